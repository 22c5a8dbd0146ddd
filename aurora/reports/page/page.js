const root = document.documentElement, live = document.getElementById("live"), figures = [], chosen = {}; // chosen: by a choice's name
const css = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
const dark = () => css("scheme") === "dark";
const make = (tag, text = "", attributes = {}) => Object.assign(document.createElement(tag), { textContent: text }, attributes);
const unpacked = async (id) => {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
};
const withUnit = (value, unit) => {
  const rounded = Number(value.toPrecision(3)), [name, scale] = [["G", 1e9], ["M", 1e6], ["k", 1e3], ["", 1], ["m", 1e-3], ["u", 1e-6], ["n", 1e-9]].find(([, least]) => Math.abs(rounded) >= least) || ["", 1];
  return `${Number((rounded / scale).toPrecision(3))} ${name}${unit}`;
};
const config = (width) => {
  const [ink, soft, grid] = ["ink", "soft", "grid"].map(css), font = getComputedStyle(document.body).fontFamily;
  const range = Object.fromEntries(["diverging", "ramp", "category", "ordinal"].map((name) => [name, css(name).split(/,\s*/)]));
  return {
    background: null, font, range, customFormatTypes: true, view: { stroke: null }, text: { fontSize: 11 },
    autosize: { type: "fit-x", contains: "padding" }, padding: 2,
    axis: { labelColor: soft, titleColor: soft, gridColor: grid, domainColor: grid, tickColor: grid, labelFontSize: 11, titleFontWeight: "normal" },
    legend: { orient: "top", labelColor: soft, titleColor: soft, labelFontSize: 11, titleFontWeight: "normal", labelLimit: 320, columns: Math.max(1, Math.floor(width / 150)) },
    title: { color: ink, anchor: "start", fontSize: 12, fontWeight: 600 },
  };
};

function rowsOf(columns) {
  const names = Object.keys(columns), rows = Array.from(columns[names[0]] || [], () => ({}));
  for (const name of names) {
    let sum = 0;
    const rising = name.endsWith("+"), field = rising ? name.slice(0, -1) : name;
    columns[name].forEach((value, i) => (rows[i][field] = rising ? (sum += value) : value));
  }
  return rows;
}

/* A figure of the page: choices, drawings, keys and the table of what is drawn. */
class Figure {
  constructor(element, { specs, choices, views, shown }) {
    Object.assign(this, { element, specs, choices, views, shown, tracks: 0, from: 0, to: 1, drawings: [] });
    const box = element.querySelector(".controls");
    this.selects = choices.map(([name]) => {
      const select = this.select(box, name, [], (at) => choose(name, at));
      for (const [sign, by, word] of [["\u2039", -1, "previous"], ["\u203a", 1, "next"]]) {
        const button = make("button", sign, { type: "button", ariaLabel: `${word} ${name}`, onclick: () => choose(name, (select.selectedIndex + by + select.length) % select.length) });
        if (by < 0) select.parentElement.before(button); else select.parentElement.after(button);
      }
      return select;
    });
    if (shown.length) this.timeControls(box);
    element.querySelector("details").addEventListener("toggle", () => this.list());
    specs.forEach((spec, number) => {
      const place = make("div", "", { className: "drawing", tabIndex: 0, role: "application" });
      place.setAttribute("aria-label", spec.title || element.querySelector("h3").textContent);
      place.addEventListener("keydown", (event) => this.key(event, number));
      place.addEventListener("blur", () => this.point(number, -1));
      element.querySelector(".drawings").append(place);
    });
    new ResizeObserver(() => this.fit()).observe(element.querySelector(".drawings"));
  }

  select(box, name, options, act) {
    const step = make("span", "", { className: "step" }), label = make("label", name), select = make("select", "", { ariaLabel: name });
    select.append(...options.map((words) => make("option", words)));
    select.addEventListener("change", () => act(select.selectedIndex));
    label.append(select);
    step.append(label);
    box.append(step);
    return select;
  }

  timeControls(box) {
    if (this.shown.length > 1) this.select(box, "show", this.shown.map(([words]) => words), (at) => this.zoom(1, 0.5, (this.tracks = at)));
    for (const [sign, words, by] of [["+", "zoom in", 0.5], ["\u2212", "zoom out", 2], ["all", "show all", Infinity]])
      box.append(make("button", sign, { type: "button", ariaLabel: words, onclick: () => this.zoom(by) }));
    const place = this.element.querySelector(".drawings");
    place.classList.add("zooms");
    place.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !place.contains(document.activeElement)) return;
      event.preventDefault();
      const edge = place.getBoundingClientRect();
      if (event.shiftKey) this.pan(Math.sign(event.deltaY || event.deltaX) / 8);
      else this.zoom(event.deltaY < 0 ? 0.8 : 1.25, (event.clientX - edge.left) / edge.width);
    }, { passive: false });
    place.addEventListener("pointermove", (event) => event.buttons && this.pan(-event.movementX / place.clientWidth));
  }

  /* Shows `by` of what is shown, around a point of it from 0 to 1; or moves by a part of it. */
  zoom(by, at = 0.5) {
    const size = Math.min(1, Math.max(1e-5, (this.to - this.from) * by));
    this.from = Math.min(Math.max(0, this.from + (this.to - this.from - size) * at), 1 - size);
    this.to = this.from + size;
    this.draw();
  }

  pan(by) {
    const size = this.to - this.from;
    this.from = Math.min(Math.max(0, this.from + by * size), 1 - size);
    this.to = this.from + size;
    this.draw();
  }

  chosenView() {
    return this.choices.reduce((views, [name, options], level) => {
      const select = this.selects[level], at = (chosen[name] || 0) % views.length;
      const names = options.length ? options : views.map((_, i) => String(i));
      if (select.length !== names.length) select.replaceChildren(...names.map((words) => make("option", words)));
      select.selectedIndex = at;
      select.closest(".step").hidden = names.length < 2;
      return views[at];
    }, this.views);
  }

  async refresh() {
    const view = this.chosenView();
    if (this.view === view) return;
    this.view = view;
    this.element.querySelector(".words").textContent = view.text;
    await this.draw();
  }

  /* The rows of a panel; of bars over time those of the shown tracks and seconds, without bars that hide behind another. */
  rows(view, number, width, whole = false) {
    const panel = view.panels[number];
    panel.rows ||= rowsOf(panel.columns);
    const params = { ...panel.params };
    if (!this.specs[number].usermeta?.spans) return [panel.rows, params];
    const total = params.total, tracks = this.shown[whole ? 0 : this.tracks][1] || params.tracks, tick = total / params.ticks;
    const from = whole ? 0 : this.from * total, to = whole ? total : this.to * total, pixel = (to - from) / width / 2, place = new Map(tracks.map((track, i) => [track, i]));
    const reached = new Map(), rows = [];
    for (const row of panel.rows) {
      const start = row.start * tick, end = (row.start + row.length) * tick;
      if (end < from || start > to) continue;
      for (const side of ["", "2"]) {
        const at = place.get(row["track" + side]), level = row["level" + side] || 0, lane = at * 4096 + level;
        if (at === undefined || (end - start < pixel && end < (reached.get(lane) ?? -1) + pixel)) continue;
        reached.set(lane, end);
        const high = 0.9 / params.depths[row["track" + side]], top = at + 0.05 + level * high;
        rows.push({ ...row, lane: tracks[at], other: row[side ? "track" : "track2"], start, end, top, foot: top + high * 0.94 });
      }
    }
    return [rows, { ...params, from, to, tracks }];
  }

  /* Draws anew; calls while it draws are one more drawing. */
  async draw() {
    if (this.busy) return void (this.again = true);
    this.busy = true;
    for (let number = 0; number < this.drawings.length && this.view; number++) await this.fill(this.drawings[number], this.view, number);
    this.busy = false;
    if (this.again) return (this.again = false), this.draw();
    this.list();
    if (this.drawings.length) this.element.dataset.drawn = "yes";
  }

  fill(drawing, view, number, { whole = false, size = 1 } = {}) {
    const spec = this.specs[number], { spans, square } = spec.usermeta || {}, [rows, params] = this.rows(view, number, drawing.width(), whole);
    for (const [name, value] of Object.entries(params)) if (spec.params?.some((param) => param.name === name)) drawing.signal(name, value);
    const each = () => (params.tracks.length > 40 ? 13 : Math.min(60, 8 + 16 * Math.max(1, Math.max(...params.tracks.map((track) => params.depths[track])) / 2)));
    return drawing.height((spans ? params.tracks.length * each() : square ? drawing.width() * 0.8 : spec.height) * size).data("rows", rows).resize().runAsync();
  }

  sized(spec, width) {
    return { ...spec, width: Math.min(width, spec.usermeta?.most || Infinity) };
  }

  async embed(place, spec, width) {
    const expressionFunctions = { seconds: (value) => withUnit(value, "s"), bytes: (value) => (value ? withUnit(value, "B") : "") };
    return (await vegaEmbed(place, this.sized(spec, width), { actions: false, renderer: "canvas", config: config(width), mode: "vega-lite", tooltip: { theme: "page" }, logLevel: 1, expressionFunctions })).view;
  }

  async dress() {
    const places = this.element.querySelectorAll(".drawing");
    this.drawings.forEach((drawing) => drawing.finalize());
    this.drawings = await Promise.all(this.specs.map((spec, number) => this.embed(places[number], spec, places[number].clientWidth)));
    await this.draw();
  }

  fit() {
    this.element.querySelectorAll(".drawing").forEach((place, number) => {
      const view = this.drawings[number], width = this.sized(this.specs[number], place.clientWidth).width;
      if (view && width && view.width() !== width) view.width(width), this.draw();
    });
  }

  /* Marks of a drawing with a tooltip, in the sequence of drawing. */
  marks(number) {
    const found = [], walk = (item) => (item.items || []).forEach((part) => (part.items ? walk(part) : part.tooltip && part.mark.marktype === "rect" && found.push(part)));
    if (this.drawings[number]) walk(this.drawings[number].scenegraph().root);
    return found;
  }

  key(event, number) {
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }, way = ways[event.key];
    const zooms = this.shown.length ? { "+": 0.5, "=": 0.5, "-": 2, 0: Infinity } : {};
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (zooms[event.key]) this.zoom(zooms[event.key]);
    else if (way && event.shiftKey && this.shown.length) this.pan(way[0] / 4);
    else if (event.key === "Escape") this.point(number, -1);
    else if (way && !event.shiftKey) this.walk(number, way);
    else return;
    event.preventDefault();
  }

  /* To the nearest mark that way: how far it is aside counts most. */
  walk(number, [x, y]) {
    const marks = this.marks(number), middle = ({ bounds }) => [(bounds.x1 + bounds.x2) / 2, (bounds.y1 + bounds.y2) / 2];
    let best = marks[this.at] ? this.at : 0, least = Infinity;
    if (marks[this.at]) {
      const [fromX, fromY] = middle(marks[this.at]);
      marks.forEach((mark, i) => {
        const [toX, toY] = middle(mark), ahead = (toX - fromX) * x + (toY - fromY) * y, aside = Math.abs((toX - fromX) * y) + Math.abs((toY - fromY) * x);
        if (ahead > 0.1 && ahead + 50 * aside < least) [best, least] = [i, ahead + 50 * aside];
      });
    }
    this.point(number, best);
  }

  /* Shows the values of a mark, which are read aloud; -1: of none. */
  point(number, at) {
    const place = this.element.querySelectorAll(".drawing")[number], drawing = this.drawings[number], mark = this.marks(number)[at];
    this.at = mark ? at : undefined;
    place.querySelector(".mark")?.remove();
    if (!mark) return drawing?.tooltip()(null, new PointerEvent("pointerout"), null, "");
    const canvas = place.querySelector("canvas"), edge = canvas.getBoundingClientRect(), { x1, x2, y1, y2 } = mark.bounds, [left, top] = drawing.origin();
    const frame = make("span", "", { className: "mark" });
    Object.assign(frame.style, { left: `${canvas.offsetLeft + left + x1}px`, top: `${canvas.offsetTop + top + y1}px`, width: `${x2 - x1}px`, height: `${y2 - y1}px` });
    place.append(frame);
    drawing.tooltip()(null, new PointerEvent("pointermove", { clientX: edge.left + left + (x1 + x2) / 2, clientY: edge.top + top + y2 }), mark, mark.tooltip);
    live.textContent = Object.entries(mark.tooltip).map((pair) => pair.join(" ")).join(", ");
  }

  list() {
    const details = this.element.querySelector("details"), place = details.querySelector(".view"), most = 2000;
    if (!details.open) return;
    place.replaceChildren(...this.specs.map((spec, number) => {
      const marks = this.marks(number), table = make("table"), box = make("div", "", { className: "scroll", tabIndex: 0 });
      table.append(make("caption", `The view above${spec.title ? ": " + spec.title : ""}${marks.length > most ? `, the first ${most} of ${marks.length} rows` : ""}`));
      const line = (tag, cells) => {
        const row = make("tr");
        row.append(...cells.map((cell) => make(tag, cell)));
        table.append(row);
      };
      if (marks.length) line("th", Object.keys(marks[0].tooltip));
      marks.slice(0, most).forEach((mark) => line("td", Object.values(mark.tooltip)));
      box.append(table);
      return box;
    }));
  }

  /* All views on paper, one below the other. What it awaits is ready, so that a browser prints after it. */
  async print() {
    const views = [this.views].flat(Infinity), many = views.length > 6, part = many ? this.specs.map((spec) => (spec.usermeta?.spans ? 2 : 1)) : [];
    const widths = this.specs.map((spec, number) => (many ? (700 / part.reduce((sum, one) => sum + one)) * part[number] - 12 : this.specs.length > 1 && !spec.usermeta?.spans ? 340 : 690));
    const drawings = [];
    for (const [number, spec] of this.specs.entries()) drawings.push(await this.embed(make("div"), spec, widths[number]));
    for (const view of views) {
      const sheet = make("div", "", { className: "sheet" });
      sheet.append(make("p", view.text));
      for (const [number, drawing] of drawings.entries()) {
        await this.fill(drawing, view, number, { whole: true, size: many && !this.specs[number].usermeta?.square ? 0.5 : 1 });
        const canvas = await drawing.toCanvas(2);
        canvas.style.width = `${canvas.width / 2}px`;
        sheet.append(canvas);
      }
      this.element.querySelector(".paper").append(sheet);
    }
  }
}

function choose(name, at) {
  chosen[name] = at;
  figures.forEach((figure) => figure.refresh());
}

const theme = document.getElementById("theme");
function dress(wanted) {
  if (wanted) root.dataset.theme = wanted;
  theme.textContent = dark() ? "Light theme" : "Dark theme";
  return Promise.all(figures.map((figure) => figure.dress()));
}
theme.addEventListener("click", () => dress(dark() ? "light" : "dark"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dress());

let before; // printing: the theme, and what was closed
addEventListener("beforeprint", async () => {
  before = { theme: root.dataset.theme, closed: document.querySelectorAll("details:not([open])") };
  before.closed.forEach((details) => (details.open = true));
  root.dataset.theme = "light";
  for (const figure of figures) await figure.print();
});
addEventListener("afterprint", () => {
  before.closed.forEach((details) => (details.open = false));
  document.querySelectorAll(".paper").forEach((paper) => paper.replaceChildren());
  if (before.theme) root.dataset.theme = before.theme; else delete root.dataset.theme;
});

const held = make("iframe", "", { hidden: true }); // while it is open, the load event waits: what prints then finds the charts
document.body.append(held);
held.contentDocument.open();
Promise.all(["library", "numbers"].map(unpacked)).then(async ([library, numbers]) => {
  document.head.append(make("script", library));
  const data = JSON.parse(numbers);
  document.querySelectorAll("[data-chart]").forEach((figure) => figures.push(new Figure(figure, data[figure.dataset.chart])));
  for (const figure of figures) await figure.refresh();
  await dress();
}).finally(() => held.remove());
