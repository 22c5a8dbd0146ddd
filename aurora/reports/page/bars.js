class Bars extends View {
  fresh() {
    this.keys("Point at a bar, or focus the chart and walk with the arrow keys.");
    this.series = this.about.series.map(([, name]) => this.shown.values[name]);
    this.count = this.series[0].length;
    this.format = FORMATS[this.about.unit];
    this.top = Math.max(...this.series.map((s) => s.reduce((a, b) => Math.max(a, b), 0))) * 1.06 || 1;
  }

  name(at) {
    return this.about.names ? this.about.names[at] : String(at);
  }

  inks() {
    const names = this.about.series.map(([name]) => name);
    return names.map((name, i) => (name === "before" || name === "after" ? colour(name) : name.startsWith("bound") ? colour("bound") : names.length === 1 ? colour("after") : theme().hues[i % 8]));
  }

  size(available) {
    return [available, 250];
  }

  paint() {
    const { context: pen, width, height } = this, left = 62, names = Array.from({ length: this.count }, (_, i) => this.name(i));
    const widest = Math.max(...names.map((name) => pen.measureText(name).width)) + 10;
    this.slot = (width - left - 8) / this.count;
    const slanted = widest > this.slot && this.slot > 24, base = height - (slanted ? 76 : 40), high = base - 14;
    this.thick = Math.min(46, (this.slot * 0.8) / this.series.length);
    this.left = left;
    this.up = (value) => base - (value / this.top) * high;
    for (const value of niceSteps(0, this.top, 5).filter((each) => this.about.unit || Number.isInteger(each))) {
      this.line(left, Math.round(this.up(value)) + 0.5, width - 8, Math.round(this.up(value)) + 0.5, colour("grid"));
      this.text(this.about.unit === "s" ? FORMATS.s(value) : this.format(value), left - 8, this.up(value), "right");
    }
    const inks = this.inks();
    for (let item = 0; item < this.count * this.series.length; item++) {
      const [x, y, w, h] = this.box(item);
      pen.fillStyle = inks[item % this.series.length];
      pen.fillRect(x, y, Math.max(0.6, w - (w > 6 ? 1 : 0)), h);
    }
    names.forEach((name, i) => {
      const x = left + (i + 0.5) * this.slot;
      if (slanted) {
        pen.save();
        pen.translate(x + 4, base + 10);
        pen.rotate(-Math.PI / 4);
        this.text(name, 0, 0, "right");
        pen.restore();
      } else if (i % Math.ceil(widest / this.slot) === 0) this.text(name, x, base + 13, "center");
    });
    this.text(this.about.axis, left + (width - left) / 2, height - 9, "center");
    this.line(left, base + 0.5, width - 8, base + 0.5, colour("rule"));
    this.legend(this.series.length > 1 ? this.about.series.map(([name], i) => [name, inks[i]]) : []);
  }

  box(item) {
    const many = this.series.length, at = Math.floor(item / many), which = item % many, value = this.series[which][at];
    const x = this.left + (at + 0.5) * this.slot + (which - many / 2) * this.thick;
    return [x, this.up(value), this.thick, this.up(0) - this.up(value)];
  }

  hit(x) {
    const at = Math.floor((x - this.left) / this.slot), many = this.series.length;
    if (at < 0 || at >= this.count) return -1;
    const which = Math.floor((x - this.left - (at + 0.5) * this.slot) / this.thick + many / 2);
    return at * many + Math.min(many - 1, Math.max(0, which));
  }

  words(item) {
    const at = Math.floor(item / this.series.length);
    const values = this.about.series.map(([name], i) => `${name}: ${this.format(this.series[i][at])}`);
    return [`${this.about.axis} ${this.name(at)}`, ...values].join("\n");
  }

  step(item, key) {
    const all = this.count * this.series.length, by = key === "Right" ? 1 : key === "Left" ? -1 : key === "Up" ? this.series.length : -this.series.length;
    return (item + by + all) % all;
  }

  table() {
    const rows = Array.from({ length: this.count }, (_, i) => [this.name(i), ...this.series.map((values) => this.format(values[i]))]);
    return [[this.about.axis, ...this.about.series.map(([name]) => name)], rows];
  }
}
