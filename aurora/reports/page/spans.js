class Spans extends View {
  controls() {
    super.controls();
    const box = this.figure.querySelector(".controls"), zoom = make("span", undefined, { className: "zoom" });
    this.side = 0;
    this.from = 0;
    this.to = 1;
    this.canvas.classList.add("zooms");
    const filters = this.filters();
    this.shows = filters[0][1];
    const offered = [[this.about.track, this.about.views, (at) => (this.side = at)], ["show", filters.map(([words]) => words), (at) => (this.shows = filters[at][1])]];
    for (const [name, options, act] of offered.filter(([, all]) => all.length > 1)) {
      const label = make("label", name), select = make("select");
      select.setAttribute("aria-label", name);
      select.append(...options.map((words) => make("option", words)));
      select.addEventListener("change", () => {
        act(select.selectedIndex);
        this.pick(-1);
        this.draw();
      });
      label.append(select);
      box.append(label);
    }
    for (const [sign, words, act] of [["+", "zoom in", () => this.zoom(0.5)], ["\u2212", "zoom out", () => this.zoom(2)], ["all", "show all", () => this.zoom(Infinity)]]) {
      const button = make("button", sign, { type: "button" });
      button.setAttribute("aria-label", words);
      button.addEventListener("click", act);
      zoom.append(button);
    }
    box.append(zoom);
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== this.canvas) return;
      event.preventDefault();
      const edge = this.canvas.getBoundingClientRect();
      if (event.shiftKey) this.pan(((this.to - this.from) * Math.sign(event.deltaY || event.deltaX)) / 8);
      else this.zoom(event.deltaY < 0 ? 0.8 : 1.25, this.from + ((event.clientX - edge.left - this.left) / this.wide) * (this.to - this.from));
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      const start = event.clientX, from = this.from, moved = (move) => {
        if (Math.abs(move.clientX - start) > 4) this.dragging = true;
        if (this.dragging) this.pan(from - ((move.clientX - start) / this.wide) * (this.to - this.from) - this.from);
      };
      const done = () => {
        removeEventListener("pointermove", moved);
        this.dragging = false;
      };
      addEventListener("pointermove", moved);
      addEventListener("pointerup", done, { once: true });
      addEventListener("pointercancel", done, { once: true });
    });
  }

  filters() {
    const { ranks, nodes } = this.about, one = (words, of) => [...new Set(of)].map((which) => [`${words} ${which}`, (rank) => of[rank] === which]);
    const all = one("node", nodes);
    return [["all ranks", () => true], ...(all.length > 1 ? all : []), ...one("rank", nodes.map((_, rank) => rank))].map(([words, has]) => [words, ranks.map(has)]);
  }

  zoom(by, at = (this.from + this.to) / 2) {
    const size = Math.min(1, Math.max(1e-5, (this.to - this.from) * by)), share = (at - this.from) / (this.to - this.from);
    this.from = Math.min(Math.max(0, at - size * share), 1 - size);
    this.to = this.from + size;
    this.draw();
    live.textContent = `shows ${FORMATS.s(this.from * this.total)} to ${FORMATS.s(this.to * this.total)}`;
  }

  pan(by) {
    const size = this.to - this.from;
    this.from = Math.min(Math.max(0, this.from + by), 1 - size);
    this.to = this.from + size;
    this.draw();
  }

  key(event) {
    const acts = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.zoom(Infinity) };
    const shift = { ArrowLeft: -0.25, ArrowRight: 0.25 }[event.key];
    if (shift && event.shiftKey) this.pan(shift * (this.to - this.from));
    else if (acts[event.key] && !event.ctrlKey && !event.metaKey) acts[event.key]();
    else return super.key(event);
    event.preventDefault();
  }

  fresh() {
    this.keys("Click the chart, then the wheel zooms and dragging pans (Ctrl and wheel without the click). Keys: + \u2212 zoom, 0 shows all, Shift and \u2190 \u2192 pan, arrows walk the bars.");
    const { start, length } = this.shown.values;
    this.ticks = start.reduce((most, at, i) => Math.max(most, at + length[i]), 1);
    this.total = this.ticks * this.shown.scale;
  }

  column(name) {
    return this.shown.values[name + this.side];
  }

  size(available) {
    this.left = Math.max(...this.about.names.map((name) => name.length)) * 7 + 16;
    const width = Math.max(available, 280);
    this.dense = this.shows.filter(Boolean).length > 40;
    let top = 26;
    const dense = this.dense ? 13 : 24;
    this.tops = Array.from(this.column("depth"), (depth, track) => {
      const at = top;
      if (this.shows[track]) top += Math.max(dense, Math.min(depth * (dense > 13 ? 15 : 6), 60)) + (dense > 13 ? 4 : 1);
      return at;
    });
    this.tops.push(top);
    this.wide = width - this.left - 8;
    return [width, top + 26];
  }

  box(item) {
    const { start, length } = this.shown.values, track = this.column("track")[item], depth = this.column("depth")[track];
    const across = (tick) => this.left + ((tick / this.ticks - this.from) / (this.to - this.from)) * this.wide;
    const high = Math.max(0, this.tops[track + 1] - this.tops[track] - (this.dense ? 1 : 4)), x = across(start[item]);
    return [x, this.tops[track] + (this.column("level")[item] * high) / depth, across(start[item] + length[item]) - x, high / depth];
  }

  paint() {
    const { context: pen, left, wide, height } = this, { start, hue } = this.shown.values, named = this.about.names;
    const other = this.shown.values["track" + (1 - this.side)], inks = hue ? theme().phases : theme().hues, letters = inks.map((ink) => inkOn(parts(ink)));
    const span = this.to - this.from, foot = this.tops[named.length];
    for (const value of niceSteps(this.from * this.total, this.to * this.total, wide / 90)) {
      const x = left + ((value / this.total - this.from) / span) * wide;
      this.line(Math.round(x) + 0.5, 20, Math.round(x) + 0.5, foot, colour("grid"));
      for (const y of [10, foot + 12]) if (x < left + wide - 14) this.text(FORMATS.s(value), x, y, "center");
    }
    const tracks = named.map((_, track) => track).filter((track) => this.shows[track]), every = Math.ceil((tracks.length * 13) / (foot - 26));
    for (const track of tracks.filter((_, i) => i % every === 0)) this.text(named[track], left - 8, (this.tops[track] + this.tops[track + 1] - 2) / 2, "right");
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, wide, height);
    pen.clip();
    for (let item = 0; item < start.length; item++) {
      const [x, y, w, h] = this.box(item);
      if (!h || x > left + wide || x + w < left) continue;
      const ink = (hue ? hue[item] : other[item]) % inks.length;
      pen.fillStyle = inks[ink];
      pen.fillRect(x, y, Math.max(0.6, w - (w > 3 ? 1 : 0)), Math.max(0.6, h - (h > 4 ? 1 : 0)));
      const label = hue ? this.short(item) : named[other[item]];
      if (h >= 11 && w > label.length * 7 + 6) this.text(label, x + w / 2, y + h / 2, "center", letters[ink]);
    }
    pen.restore();
    this.legend(hue ? this.about.legend.map(([words, ink]) => [words, ink === null ? undefined : inks[ink % inks.length]]) : []);
  }

  short(item) {
    const phase = this.about.fields.findIndex(([name]) => name === "phase");
    return this.about.fields[phase][1][this.shown.values["field" + phase][item]];
  }

  hit(x, y) {
    if (x < this.left) return -1;
    const { start } = this.shown.values;
    let near = -1, nearest = 3;
    for (let item = 0; item < start.length; item++) {
      const [left, top, wide, high] = this.box(item);
      const away = Math.max(left - x, x - left - wide, 0);
      if (high && y >= top && y < top + high && (away < nearest || (near < 0 && away <= 3))) [near, nearest] = [item, away];
    }
    return near;
  }

  fields(item) {
    const { start, length, bytes } = this.shown.values, scale = this.shown.scale, track = this.column("track")[item];
    const cells = this.about.fields.map(([name, names], i) => {
      const value = this.shown.values["field" + i][item];
      return [name, names ? names[value] : String(value)];
    });
    if (this.about.views.length) {
      const ends = [this.shown.values.track0[item], this.shown.values.track1[item]].map((gpu) => this.about.names[gpu]);
      cells.push(["from GPU", ends[0]], ["to GPU", ends[1]]);
    } else cells.unshift(["rank", this.about.names[track]]);
    cells.push(["start", FORMATS.s(start[item] * scale)], ["takes", FORMATS.s(length[item] * scale)]);
    if (bytes[item] || this.about.views.length) cells.push(["bytes", FORMATS.bytes(bytes[item])]);
    return cells;
  }

  words(item) {
    return this.fields(item).map(([name, value]) => `${name} ${value}`).join("\n");
  }

  first() {
    const { start, length } = this.shown.values, tracks = this.column("track");
    return start.findIndex((at, i) => this.shows[tracks[i]] && (at + length[i]) / this.ticks >= this.from);
  }

  step(item, key) {
    const { start } = this.shown.values, tracks = this.column("track"), ahead = key === "Right" || key === "Down" ? 1 : -1;
    let found = item;
    if (key === "Left" || key === "Right") {
      for (let at = item + ahead; at >= 0 && at < start.length; at += ahead) if (tracks[at] === tracks[item]) { found = at; break; }
    } else {
      for (let track = tracks[item] + ahead; track >= 0 && track < this.about.names.length && found === item; track += ahead) {
        let nearest = Infinity;
        tracks.forEach((own, at) => {
          if (own === track && this.shows[own] && Math.abs(start[at] - start[item]) < nearest) [found, nearest] = [at, Math.abs(start[at] - start[item])];
        });
      }
    }
    const at = start[found] / this.ticks;
    if (at < this.from || at > this.to) this.pan(at - (this.from + this.to) / 2);
    return found;
  }

  table() {
    const rows = Array.from({ length: Math.min(this.shown.values.start.length, MOST_ROWS) }, (_, item) => this.fields(item));
    rows.length = this.shown.values.start.length;
    const heads = rows[0] ? rows[0].map(([name]) => name) : [];
    return [heads, rows.map((cells) => cells.map(([, value]) => value))];
  }
}
