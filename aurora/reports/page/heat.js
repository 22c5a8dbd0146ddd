class Heat extends View {
  fresh() {
    this.keys("Point at a cell, or focus the maps and walk with the arrow keys.");
    const { before, after } = this.shown.values;
    this.count = this.about.names.length;
    this.sides = [before, after];
    this.most = Math.max(1, before.reduce((a, b) => Math.max(a, b), 0), after.reduce((a, b) => Math.max(a, b), 0));
  }

  size(available) {
    const margin = 110, beside = available >= 2 * (this.count * 6 + margin) && available >= 560;
    const free = (beside ? available / 2 : available) - margin - 8;
    this.cell = Math.max(6, Math.min(this.count > 8 ? 46 : 64, Math.floor(free / this.count)));
    this.side = this.cell * this.count;
    const [w, h] = [this.side + margin, this.side + 96];
    this.at = beside ? [[38, 38], [38 + Math.min(available / 2, w + 60), 38]] : [[38, 38], [38, 38 + h]];
    return [beside ? Math.max(this.at[1][0] + w - 38, 10) : Math.max(w, 200), beside ? h : 2 * h];
  }

  paint() {
    const { context: pen, count, cell, side } = this, values = this.shown.values, stops = theme().ramp;
    const every = Math.ceil((count * 22) / side);
    ["before", "after"].forEach((name, number) => {
      const [left, top] = this.at[number], tokens = this.sides[number];
      this.text(name === "before" ? "Before: experts in index order" : "After: as planned", left, top - 26, "left", colour("ink"));
      for (let i = 0; i < count * count; i++) {
        const rgb = ramp(stops, tokens[i] / this.most), x = left + (i % count) * cell, y = top + Math.floor(i / count) * cell;
        pen.fillStyle = `rgb(${rgb})`;
        pen.fillRect(x, y, cell - (cell > 8 ? 1 : 0), cell - (cell > 8 ? 1 : 0));
        if (cell >= 34 && tokens[i]) this.text(String(tokens[i]), x + cell / 2, y + cell / 2, "center", inkOn(rgb));
      }
      for (let i = 0; i < count; i += every) {
        this.text(this.about.names[i], left - 6, top + (i + 0.5) * cell, "right");
        this.text(this.about.names[i], left + (i + 0.5) * cell, top - 8, "center");
      }
      const out = values[name + "-out"], into = values[name + "-in"], busiest = Math.max(1, ...out, ...into, ...values["before-out"], ...values["before-in"]);
      for (let i = 0; i < count; i++) {
        pen.fillStyle = colour(number ? "after" : "before");
        pen.fillRect(left + side + 5, top + i * cell, (30 * out[i]) / busiest, Math.max(1, cell - 1));
        pen.fillRect(left + i * cell, top + side + 5, Math.max(1, cell - 1), (30 * into[i]) / busiest);
      }
      this.text("sends \u2192", left + side + 5, top - 8);
      this.text("receives \u2193", left, top + side + 46);
    });
    this.legend([0, 0.25, 0.5, 0.75, 1].map((share) => [`${Math.round(share * this.most)}${share === 1 ? " tokens" : ""}`, `rgb(${ramp(stops, share)})`]));
  }

  hit(x, y) {
    for (let number = 0; number < 2; number++) {
      const column = Math.floor((x - this.at[number][0]) / this.cell), row = Math.floor((y - this.at[number][1]) / this.cell);
      if (column >= 0 && row >= 0 && column < this.count && row < this.count) return (number * this.count + row) * this.count + column;
    }
    return -1;
  }

  split(item) {
    const square = this.count * this.count;
    return [Math.floor(item / square), Math.floor((item % square) / this.count), item % this.count];
  }

  box(item) {
    const [number, row, column] = this.split(item), [left, top] = this.at[number];
    return [left + column * this.cell, top + row * this.cell, this.cell, this.cell];
  }

  words(item) {
    const [number, row, column] = this.split(item), tokens = this.sides[number][row * this.count + column];
    return `${number ? "After" : "Before"}: GPU ${this.about.names[row]} to GPU ${this.about.names[column]}\n` +
      (row === column ? "stays on the GPU" : `${tokens} tokens, ${FORMATS.bytes(tokens * this.shown.scale)}`);
  }

  step(item, key) {
    const [number, row, column] = this.split(item), n = this.count;
    if (key === "Up" || key === "Down") return (number * n + ((row + (key === "Down" ? 1 : n - 1)) % n)) * n + column;
    const along = (number * n + column + (key === "Right" ? 1 : 2 * n - 1)) % (2 * n);
    return (Math.floor(along / n) * n + row) * n + (along % n);
  }

  table() {
    const { names } = this.about, rows = [];
    for (let row = 0; row < this.count; row++) {
      for (let column = 0; column < this.count; column++) {
        if (row !== column) rows.push([names[row], names[column], ...this.sides.map((tokens) => String(tokens[row * this.count + column]))]);
      }
    }
    return [["from GPU", "to GPU", "tokens before", "tokens after"], rows];
  }
}
