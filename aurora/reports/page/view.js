/* A figure of the page: choices, canvas, tooltip, keys and the table of what is shown. A kind of chart adds
   size(width), paint(), hit(x, y), box(item), words(item), step(item, key) and table(). */
class View {
  constructor(figure) {
    this.figure = figure;
    this.spec = CHARTS[figure.dataset.chart];
    this.about = this.spec.about;
    this.canvas = figure.querySelector("canvas");
    this.context = this.canvas.getContext("2d");
    this.item = -1;
    this.controls();
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.pick(-1));
    this.canvas.addEventListener("blur", () => this.pick(-1));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    figure.querySelector("details").addEventListener("toggle", () => this.list());
    new ResizeObserver(() => this.shown && this.draw()).observe(this.canvas.parentElement);
  }

  controls() {
    const box = this.figure.querySelector(".controls");
    this.selects = this.spec.choices.map(([name]) => {
      const label = make("label", name), select = make("select");
      select.setAttribute("aria-label", name);
      select.addEventListener("change", () => choose(name, select.selectedIndex));
      const step = make("span", undefined, { className: "step" });
      for (const [sign, by, word] of [["\u2039", -1, "previous"], ["\u203a", 1, "next"]]) {
        const button = make("button", sign, { type: "button" });
        button.setAttribute("aria-label", `${word} ${name}`);
        button.addEventListener("click", () => choose(name, (select.selectedIndex + by + select.length) % select.length));
        step.append(button);
      }
      label.append(select);
      step.insertBefore(label, step.lastChild);
      box.append(step);
      return select;
    });
  }

  async refresh() {
    let frame = this.spec.frames;
    this.spec.choices.forEach(([name, options], level) => {
      const select = this.selects[level], at = (chosen[name] || 0) % frame.length;
      const names = options.length ? options : frame.map((_, i) => String(i));
      if (select.length !== names.length) select.replaceChildren(...names.map((text) => make("option", text)));
      select.selectedIndex = at;
      select.closest(".step").hidden = names.length < 2;
      frame = frame[at];
    });
    if (this.frame === frame) return;
    this.frame = frame;
    this.shown = await unpack(frame);
    if (this.frame !== frame) return;
    this.item = -1;
    this.figure.querySelector(".words").textContent = frame.text;
    this.fresh();
    this.draw();
    this.list();
    this.figure.dataset.drawn = "yes";
  }

  fresh() {}

  draw() {
    const available = printing ? PRINTED_PX : this.canvas.parentElement.clientWidth;
    if (!available || !this.shown) return;
    const [width, height] = this.size(available), ratio = printing ? 2 : window.devicePixelRatio || 1;
    this.width = width;
    this.height = height;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = width + "px";
    this.canvas.style.height = height + "px";
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.font = FONT;
    this.context.textBaseline = "middle";
    this.paint();
    if (this.item >= 0) {
      this.context.strokeStyle = colour("focus");
      this.context.lineWidth = 2;
      const [x, y, w, h] = this.box(this.item);
      this.context.strokeRect(x, y, Math.max(w, 2), h);
    }
  }

  text(words, x, y, align = "left", ink = colour("soft")) {
    this.context.fillStyle = ink;
    this.context.textAlign = align;
    this.context.fillText(words, x, y);
  }

  line(x0, y0, x1, y1, ink, dashes = []) {
    this.context.strokeStyle = ink;
    this.context.lineWidth = dashes.length ? 1.5 : 1;
    this.context.setLineDash(dashes);
    this.context.beginPath();
    this.context.moveTo(x0, y0);
    this.context.lineTo(x1, y1);
    this.context.stroke();
    this.context.setLineDash([]);
  }

  legend(entries) {
    this.figure.querySelector(".legend").replaceChildren(...entries.map(([words, ink, dashed]) => {
      if (!ink) return make("b", words);
      const swatch = make("i", undefined, dashed ? { className: "line" } : {}), entry = make("span");
      swatch.style[dashed ? "borderColor" : "background"] = ink;
      entry.append(swatch, words);
      return entry;
    }));
  }

  point(event) {
    if (!this.shown || this.dragging) return;
    const edge = this.canvas.getBoundingClientRect();
    this.pick(this.hit(event.clientX - edge.left, event.clientY - edge.top), event.clientX, event.clientY);
  }

  pick(item, x, y) {
    const changed = item !== this.item;
    this.item = item;
    tip.hidden = item < 0;
    if (changed && this.shown) this.draw();
    if (item < 0) return;
    if (changed || !tip.textContent) tip.textContent = this.words(item);
    if (x === undefined) {
      const edge = this.canvas.getBoundingClientRect(), [left, top, wide, high] = this.box(item);
      const box = this.canvas.parentElement, inside = left - box.scrollLeft;
      if (inside < 0 || inside > box.clientWidth - 20) box.scrollLeft = left - box.clientWidth / 2;
      x = edge.left + left + wide / 2;
      y = edge.top + top + high;
      live.textContent = tip.textContent;
    }
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - wide - 6)) + "px";
    tip.style.top = (y + 18 + high > innerHeight ? Math.max(6, y - high - 12) : y + 18) + "px";
  }

  key(event) {
    if (!this.shown) return;
    if (event.key === "Escape") return this.pick(-1);
    if (!event.key.startsWith("Arrow") || event.shiftKey || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.pick(this.item < 0 ? this.first() : this.step(this.item, event.key.slice(5)));
  }

  first() {
    return 0;
  }

  list() {
    const details = this.figure.querySelector("details"), place = details.querySelector(".view");
    if (!details.open || !this.shown) return;
    const [heads, rows] = this.table(), table = make("table"), body = make("tbody"), head = make("tr");
    const left = rows.length > MOST_ROWS ? `, the first ${MOST_ROWS} of ${rows.length} rows` : "";
    table.append(make("caption", `The view above${left}`));
    head.append(...heads.map((words) => make("th", words, { scope: "col" })));
    for (const cells of rows.slice(0, MOST_ROWS)) {
      const row = make("tr");
      row.append(...cells.map((words) => make("td", words)));
      body.append(row);
    }
    const above = make("thead");
    above.append(head);
    table.append(above, body);
    const scroll = make("div", undefined, { className: "scroll", tabIndex: 0 });
    scroll.append(table);
    place.replaceChildren(scroll);
  }

  keys(words) {
    this.figure.querySelector(".keys").textContent = words;
  }
}
