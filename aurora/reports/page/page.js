const root = document.documentElement, live = document.getElementById("live"), figures = [], chosen = {}; // chosen: by a choice's name
const css = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
const clamp = (value, least, most) => Math.min(Math.max(value, least), most);
const make = (tag, text = "", attributes = {}) => Object.assign(document.createElement(tag), { textContent: text }, attributes);
const unpacked = async (id) => {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
};
const withUnit = (value, unit) => {
  const rounded = Number(value.toPrecision(3)), units = [["G", 1e9], ["M", 1e6], ["k", 1e3], ["", 1], ["m", 1e-3], ["u", 1e-6], ["n", 1e-9]];
  const [name, scale] = units.find(([, least]) => Math.abs(rounded) >= least) || ["", 1];
  return `${Number((rounded / scale).toPrecision(3))} ${name}${unit}`;
};
const expressionFunctions = { seconds: (value) => withUnit(value, "s"), bytes: (value) => (value ? withUnit(value, "B") : "") };

function config(width) {
  const soft = { labelColor: css("soft"), titleColor: css("soft"), labelFontSize: 11, titleFontWeight: "normal" }, grid = css("grid");
  return {
    background: null, font: getComputedStyle(document.body).fontFamily, customFormatTypes: true, view: { stroke: null }, padding: 2,
    autosize: { type: "fit-x", contains: "padding" }, title: { color: css("ink"), anchor: "start", fontSize: 12 },
    range: Object.fromEntries(["diverging", "ramp", "category", "ordinal"].map((name) => [name, css(name).split(/,\s*/)])),
    axis: { ...soft, gridColor: grid, domainColor: grid, tickColor: grid },
    legend: { ...soft, orient: "top", labelLimit: 320, columns: Math.max(1, Math.floor(width / 150)) },
  };
}

function rowsOf(columns) {
  const names = Object.keys(columns), rows = Array.from(columns[names[0]], () => ({}));
  for (const name of names) {
    let sum = 0;
    const rising = name.endsWith("+"), field = rising ? name.slice(0, -1) : name;
    columns[name].forEach((value, i) => (rows[i][field] = rising ? (sum += value) : value));
  }
  return rows;
}

/* A figure of the page: choices, drawings, keys and the table of what is drawn. */
class Figure {
  constructor(element, figure) {
    Object.assign(this, figure, { element, drawings: [], from: 0, size: 1 });
    const box = element.querySelector("form"), place = element.querySelector(".drawings"), names = this.shown.map(([words]) => words);
    this.selects = this.choices.map((name) => this.select(box, name, [], (value) => choose(name, value)));
    if (names.length) {
      const tracks = this.select(box, "show", names, () => this.draw()), buttons = [["+", "zoom in", 0.5], ["\u2212", "zoom out", 2], ["all", "show all", Infinity]];
      this.tracks = () => this.shown[tracks.selectedIndex][1];
      tracks.parentElement.hidden = names.length < 2;
      box.append(...buttons.map(([sign, ariaLabel, by]) => make("button", sign, { type: "button", ariaLabel, onclick: () => this.zoom(by) })));
      place.addEventListener("pointermove", (event) => event.buttons && this.zoom(1, 0, -event.movementX / place.clientWidth));
      place.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        const edge = place.getBoundingClientRect();
        this.zoom(event.deltaY < 0 ? 0.8 : 1.25, (event.clientX - edge.left) / edge.width);
      }, { passive: false });
    }
    this.places = this.specs.map((spec, number) => {
      const drawing = make("div", "", { tabIndex: 0, role: "application", ariaLabel: spec.title || element.querySelector("h3").textContent });
      drawing.style.maxWidth = `${spec.usermeta.most}px`;
      drawing.addEventListener("keydown", (event) => this.key(event, number));
      drawing.addEventListener("blur", () => this.point(number));
      place.append(drawing);
      return drawing;
    });
    element.querySelector("details").addEventListener("toggle", () => this.list());
    new ResizeObserver(() => {
      const width = this.places[0].clientWidth;
      if (this.drawings.length && width && width !== this.width) this.dress();
    }).observe(place);
  }

  select(box, name, options, act) {
    const label = make("label", name), select = make("select", "", { ariaLabel: name, onchange: () => act(select.value) });
    select.append(...options.map((words) => make("option", words)));
    label.append(select);
    box.append(label);
    return select;
  }

  /* Takes the view of the reader's choices; of a choice that the figure does not have, its first one. */
  choose() {
    let views = this.views;
    this.selects.forEach((select, level) => {
      const names = [...new Set(views.map((view) => view.at[level]))], name = chosen[this.choices[level]];
      select.replaceChildren(...names.map((words) => make("option", words)));
      select.value = names.includes(name) ? name : names[0];
      select.parentElement.hidden = names.length < 2;
      views = views.filter((view) => view.at[level] === select.value);
    });
    if (this.view === views[0]) return;
    this.view = views[0];
    this.element.querySelector("figcaption p").textContent = [...this.choices.map((name, i) => `${name} ${this.view.at[i]}`), this.view.text].join(", ");
    this.draw();
  }

  /* The rows of a panel; of bars over time those in sight, on each of their tracks, without bars that hide behind another. */
  rows(panel, tracks, { from, to }) {
    const all = (panel.rows ||= rowsOf(panel.columns)), { depths, total, ticks } = panel.params;
    if (!tracks) return all;
    const place = new Map(tracks.map((track, i) => [track, i])), reached = new Map(), rows = [], pixel = (to - from) / this.width / 2;
    for (const row of all) {
      const start = (row.begin * total) / ticks, end = start + (row.length * total) / ticks;
      if (end < from || start > to) continue;
      for (const side of ["", "2"]) {
        const at = place.get(row["track" + side]), level = row["level" + side], lane = at * 4096 + level;
        if (at === undefined || (end - start < pixel && end < (reached.get(lane) ?? -1) + pixel)) continue;
        reached.set(lane, end);
        const high = 0.9 / depths[tracks[at]], top = at + 0.05 + level * high;
        rows.push({ ...row, lane: tracks[at], other: row[side ? "track" : "track2"], start, end, top, foot: top + high * 0.94 });
      }
    }
    return rows;
  }

  /* Draws the view anew; calls while it draws are one more drawing. */
  async draw() {
    if (this.busy || !this.drawings.length) return void (this.again = this.busy);
    this.busy = true;
    for (const [number, drawing] of this.drawings.entries()) {
      const panel = this.view.panels[number], { total, depths } = panel.params, from = this.from * total, params = { ...panel.params, from, to: from + this.size * total };
      const tracks = this.specs[number].usermeta.spans && (params.tracks = this.tracks() || params.tracks);
      for (const { name } of this.specs[number].params) if (name in params) drawing.signal(name, params[name]);
      const each = tracks && (tracks.length > 40 ? 13 : clamp(8 + 8 * Math.max(...tracks.map((track) => depths[track])), 24, 60));
      if (tracks) drawing.height(tracks.length * each);
      await drawing.data("rows", this.rows(panel, tracks, params)).resize().runAsync();
    }
    this.busy = false;
    if (this.again) return (this.again = false), this.draw();
    this.list();
    this.element.dataset.drawn = "yes";
  }

  /* Makes the drawings, in the page's theme and width. */
  async dress(renderer = "canvas") {
    this.drawings.forEach((drawing) => drawing.finalize());
    this.width = this.places[0].clientWidth;
    const options = { actions: false, renderer, mode: "vega-lite", tooltip: { theme: "page", disableDefaultStyle: true }, logLevel: 1, expressionFunctions };
    this.drawings = await Promise.all(this.places.map(async (place, number) => {
      const spec = this.specs[number], width = place.clientWidth, height = spec.usermeta.square ? width * 0.8 : spec.height;
      const { view } = await vegaEmbed(place, { ...spec, width, height }, { ...options, config: config(width) });
      return view;
    }));
    await this.draw();
  }

  /* Shows `by` of what is shown, around a point of it from 0 to 1, moved by a part of it. */
  zoom(by, at = 0.5, moved = 0) {
    const size = clamp(this.size * by, 1e-5, 1);
    [this.from, this.size] = [clamp(this.from + (this.size - size) * at + moved * size, 0, 1 - size), size];
    this.draw();
  }

  /* Marks of a drawing with a tooltip, row by row. */
  marks(number) {
    const walk = (item) => (item.items || []).flatMap((part) => (part.items ? walk(part) : part.tooltip && part.mark.marktype === "rect" ? [part] : []));
    const found = this.drawings[number] ? walk(this.drawings[number].scenegraph().root) : [];
    return found.sort((a, b) => a.bounds.y1 - b.bounds.y1 || a.bounds.x1 - b.bounds.x1);
  }

  key(event, number) {
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const zoom = this.shown.length ? { "+": 0.5, "=": 0.5, "-": 2, 0: Infinity }[event.key] : 0;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (zoom) this.zoom(zoom);
    else if (way && event.shiftKey && this.shown.length) this.zoom(1, 0, way[0] / 4);
    else if (event.key === "Escape") this.point(number);
    else if (way) this.point(number, this.next(this.marks(number), way));
    else return;
    event.preventDefault();
  }

  /* The nearest mark that way: how far it is aside counts most. */
  next(marks, [x, y]) {
    const middle = ({ bounds }) => [(bounds.x1 + bounds.x2) / 2, (bounds.y1 + bounds.y2) / 2];
    if (!marks.includes(this.mark)) return marks[0];
    const [fromX, fromY] = middle(this.mark), far = marks.map((mark) => {
      const [toX, toY] = middle(mark), ahead = (toX - fromX) * x + (toY - fromY) * y;
      return ahead > 0.1 ? ahead + 50 * Math.abs((toX - fromX) * y + (toY - fromY) * x) : Infinity;
    });
    const least = far.reduce((best, value) => Math.min(best, value), Infinity);
    return least < Infinity ? marks[far.indexOf(least)] : this.mark;
  }

  /* Shows the values of a mark, which are read aloud; of none without one. */
  point(number, mark) {
    const place = this.places[number], drawing = this.drawings[number];
    this.mark = mark;
    place.querySelector("span")?.remove();
    if (!mark) return drawing?.tooltip()(null, new PointerEvent("pointerout"), null, "");
    const canvas = place.querySelector("canvas"), edge = canvas.getBoundingClientRect(), { x1, x2, y1, y2 } = mark.bounds, [left, top] = drawing.origin();
    place.append(make("span", "", { style: `left: ${left + x1}px; top: ${top + y1}px; width: ${x2 - x1}px; height: ${y2 - y1}px` }));
    drawing.tooltip()(null, new PointerEvent("pointermove", { clientX: edge.left + left + (x1 + x2) / 2, clientY: edge.top + top + y2 }), mark, mark.tooltip);
    live.textContent = Object.entries(mark.tooltip).map((pair) => pair.join(" ")).join(", ");
  }

  /* What is drawn, as tables. */
  list() {
    const details = this.element.querySelector("details"), most = 2000, line = (tag, cells) => {
      const row = make("tr");
      row.append(...cells.map((cell) => make(tag, cell)));
      return row;
    };
    if (details.open) details.querySelector(".view").replaceChildren(...this.specs.flatMap(({ title }, number) => {
      const marks = this.marks(number), table = make("table"), some = marks.length > most ? `, the first ${most} of ${marks.length} rows` : "";
      table.append(make("caption", `The view above${title ? ": " + title : ""}${some}`), line("th", Object.keys(marks[0]?.tooltip || {})));
      table.append(...marks.slice(0, most).map((mark) => line("td", Object.values(mark.tooltip))));
      return table;
    }));
  }
}

function choose(name, value) {
  chosen[name] = value;
  figures.forEach((figure) => figure.choose());
}

const button = document.getElementById("theme"), darkness = matchMedia("(prefers-color-scheme: dark)");
function dress(theme, renderer) {
  root.dataset.theme = theme;
  button.textContent = theme === "dark" ? "Light theme" : "Dark theme";
  return Promise.all(figures.map((figure) => figure.dress(renderer)));
}
button.onclick = () => dress(root.dataset.theme === "dark" ? "light" : "dark");
darkness.onchange = () => dress(darkness.matches ? "dark" : "light");

let before; // printing: the theme, and what was closed
addEventListener("beforeprint", () => {
  before = { theme: root.dataset.theme, closed: document.querySelectorAll("details:not([open])") };
  before.closed.forEach((details) => (details.open = true));
  dress("light", "svg");
});
addEventListener("afterprint", () => {
  before.closed.forEach((details) => (details.open = false));
  dress(before.theme);
});

const held = make("iframe", "", { hidden: true }); // while it is open, the load event waits: what prints then finds the charts
document.body.append(held);
held.contentDocument.open();
dress(darkness.matches ? "dark" : "light");
Promise.all(["library", "numbers"].map(unpacked)).then(([library, numbers]) => {
  document.head.append(make("script", library));
  const data = JSON.parse(numbers);
  figures.push(...Array.from(document.querySelectorAll("figure"), (figure) => new Figure(figure, data[figure.dataset.chart])));
  choose();
  return Promise.all(figures.map((figure) => figure.dress()));
}).finally(() => held.remove());
