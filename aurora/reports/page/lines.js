/* Values over time as steps: each holds since the one before it was taken. The columns "mark" and "kind" are when marks stand
   and which of about.marks each is. */
class Lines extends View {
  fresh() {
    this.keys("Point at a moment, or focus the chart and walk with the arrow keys.");
    const { at, mark } = this.shown.values;
    this.at = at;
    this.series = this.about.series.map(([, name]) => this.shown.values[name]);
    this.last = Math.max(at[at.length - 1], mark.length ? mark[mark.length - 1] : 0) || 1;
  }

  inks() {
    return this.about.series.map((_, i) => theme().hues[i]);
  }

  size(available) {
    return [available, 250];
  }

  paint() {
    const { context: pen, width, height } = this, left = 62, base = height - 40, high = base - 14, wide = width - left - 8;
    this.left = left;
    this.across = (at) => left + (at / this.last) * wide;
    this.up = (value) => base - value * high;
    for (const value of niceSteps(0, 1, 5)) {
      this.line(left, Math.round(this.up(value)) + 0.5, width - 8, Math.round(this.up(value)) + 0.5, colour("grid"));
      this.text(FORMATS.share(value), left - 8, this.up(value), "right");
    }
    const times = niceSteps(0, this.last, Math.max(2, wide / 90)).filter((at) => this.across(at) < left + wide - 14);
    for (const at of times) this.text(FORMATS.s(at), this.across(at), base + 13, "center");
    this.text(this.about.axis, left + wide / 2, height - 9, "center");
    this.line(left, base + 0.5, width - 8, base + 0.5, colour("rule"));
    const { mark, kind } = this.shown.values, inks = this.inks(), marks = this.about.marks.map((_, i) => theme().hues[inks.length + i]);
    mark.forEach((at, i) => this.line(this.across(at), 14, this.across(at), base, marks[kind[i]], [[6, 4], [2, 3], [1, 4], [4, 2]][kind[i] % 4]));
    this.series.forEach((values, i) => {
      pen.strokeStyle = inks[i];
      pen.lineWidth = 2;
      pen.beginPath();
      pen.moveTo(left, this.up(values[0]));
      values.forEach((value, point) => {
        pen.lineTo(this.across(point ? this.at[point - 1] : 0), this.up(value));
        pen.lineTo(this.across(this.at[point]), this.up(value));
      });
      pen.stroke();
    });
    const seen = new Set(kind);
    this.legend([
      ...this.about.series.map(([name], i) => [name, inks[i]]),
      ...this.about.marks.map((name, i) => [name, marks[i], true]).filter((_, i) => seen.has(i)),
    ]);
  }

  box(item) {
    const from = this.across(item ? this.at[item - 1] : 0), tops = this.series.map((values) => this.up(values[item]));
    return [from, Math.min(...tops) - 2, this.across(this.at[item]) - from, Math.max(...tops) - Math.min(...tops) + 4];
  }

  hit(x) {
    const at = this.at.findIndex((end) => x <= this.across(end));
    return x < this.left ? -1 : at;
  }

  cells(item) {
    const values = this.series.map((each) => FORMATS.share(each[item]));
    return [...values, ...this.about.more.map(([, name, unit]) => FORMATS[unit](this.shown.values[name][item]))];
  }

  heads() {
    return [...this.about.series, ...this.about.more].map(([name]) => name);
  }

  words(item) {
    const cells = this.cells(item), { mark, kind } = this.shown.values, from = item ? this.at[item - 1] : 0;
    const marks = Array.from(mark, (at, i) => [at, kind[i]]).filter(([at]) => at > from && at <= this.at[item]);
    return [`until ${FORMATS.s(this.at[item])}`, ...this.heads().map((name, i) => `${name}: ${cells[i]}`), ...marks.map(([, which]) => this.about.marks[which])].join("\n");
  }

  step(item, key) {
    const by = key === "Right" || key === "Down" ? 1 : -1;
    return (item + by + this.at.length) % this.at.length;
  }

  table() {
    return [[this.about.axis, ...this.heads()], Array.from(this.at, (at, item) => [FORMATS.s(at), ...this.cells(item)])];
  }
}
