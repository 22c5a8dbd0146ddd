/* Heat maps side by side, or one below the other where there is no room. The numbers tell each map's rows. */
class Heat extends View {
  fresh() {
    this.keys("Point at a cell, or focus the maps and walk with the arrow keys.");
    const { values, scale } = this.shown;
    let from = 0;
    this.maps = this.about.maps.map(([title, name, row, column], i) => {
      const rows = values.rows[i], cells = values[name], first = from;
      from += cells.length;
      return { title, row, column, rows, cells, first, columns: cells.length / rows, out: values[name + "-out"], into: values[name + "-in"] };
    });
    this.most = Math.max(1, ...this.maps.map(({ cells }) => cells.reduce((a, b) => Math.max(a, b), 0)));
    this.busiest = Math.max(1, ...this.maps.flatMap(({ out, into }) => [...(out || []), ...(into || [])]));
    this.value = this.about.relative ? (cell) => three(cell * scale) : String;
    this.share = this.about.relative ? (cell) => (Math.log2(cell * scale) + 2) / 4 : (cell) => cell / this.most;
  }

  size(available) {
    const { square } = this.about, many = this.maps.length, [left, top, more] = [44, 44, square ? 62 : 16], gap = 16;
    const least = left + more + Math.max(150, square ? 3 * this.maps[0].columns : 0), beside = available >= many * least + gap * (many - 1);
    const free = (beside ? (available - gap * (many - 1)) / many : available) - left - more;
    const heights = this.maps.map(({ rows }) => Math.min(26 * rows, Math.max((printing ? 2 : 3) * rows, 400)));
    let [x, y] = [left, top];
    this.maps.forEach((map, i) => {
      const wide = Math.min(free, map.columns * (square && map.columns > 8 ? 46 : 64));
      Object.assign(map, { x, y, wide, high: square ? wide : beside ? Math.max(...heights) : heights[i] });
      if (beside) x += Math.min(free, Math.max(wide, 200)) + left + more + gap;
      else y += map.high + top + more;
    });
    return [available, Math.max(...this.maps.map((map) => map.y + map.high)) + more];
  }

  paint() {
    const pen = this.context, stops = this.about.relative ? theme().sides : theme().ramp;
    this.maps.forEach((map, number) => {
      const { x, y, rows, columns, cells, wide, high, out, into } = map, [w, h] = [wide / columns, high / rows], gap = Math.min(w, h) > 8 ? 1 : 0;
      this.text(map.title, x, y - 26, "left", colour("ink"));
      cells.forEach((cell, i) => {
        const rgb = ramp(stops, this.share(cell)), [left, top, right, foot] = this.edges(map, i);
        pen.fillStyle = `rgb(${rgb})`;
        pen.fillRect(left, top, right - left - gap, foot - top - gap);
        if (w >= 34 && h >= 16 && cell) this.text(this.value(cell), x + ((i % columns) + 0.5) * w, y + (Math.floor(i / columns) + 0.5) * h, "center", inkOn(rgb));
      });
      for (let i = 0; i < rows; i += Math.ceil(15 / h)) this.text(String(i), x - 6, y + (i + 0.5) * h, "right");
      for (let i = 0; i < columns; i += Math.ceil(24 / w)) this.text(String(i), x + (i + 0.5) * w, y - 8, "center");
      if (!out) return this.text(`${map.row} \u2193  ${map.column} \u2192`, x, y + high + 9);
      pen.fillStyle = colour(number ? "after" : "before");
      out.forEach((sent, i) => pen.fillRect(x + wide + 5, y + i * h, (30 * sent) / this.busiest, Math.max(0.6, h - 1)));
      into.forEach((got, i) => pen.fillRect(x + i * w, y + high + 5, Math.max(0.6, w - 1), (30 * got) / this.busiest));
      this.text("sends \u2192", x + wide + 5, y - 26);
      this.text("receives \u2193", x, y + high + 46);
    });
    this.legend(this.about.relative
      ? [["a quarter of the mean, or less", 0], ["half", 0.25], ["the layer\u2019s mean", 0.5], ["twice", 0.75], ["four times, or more", 1]].map(([words, share]) => [words, `rgb(${ramp(stops, share)})`])
      : [0, 0.25, 0.5, 0.75, 1].map((share) => [`${Math.round(share * this.most)}${share === 1 ? " tokens" : ""}`, `rgb(${ramp(stops, share)})`]));
  }

  edges({ x, y, rows, columns, wide, high }, cell) {
    const across = (at) => x + Math.round((at * wide) / columns), down = (at) => y + Math.round((at * high) / rows);
    const [row, column] = [Math.floor(cell / columns), cell % columns];
    return [across(column), down(row), Math.max(across(column + 1), across(column) + 1), Math.max(down(row + 1), down(row) + 1)];
  }

  hit(x, y) {
    for (const map of this.maps) {
      const column = Math.floor(((x - map.x) / map.wide) * map.columns), row = Math.floor(((y - map.y) / map.high) * map.rows);
      if (column >= 0 && row >= 0 && column < map.columns && row < map.rows) return map.first + row * map.columns + column;
    }
    return -1;
  }

  at(item) {
    const number = this.maps.findLastIndex((map) => map.first <= item), map = this.maps[number], cell = item - map.first;
    return [number, map, Math.floor(cell / map.columns), cell % map.columns];
  }

  box(item) {
    const [, map] = this.at(item), [left, top, right, foot] = this.edges(map, item - map.first);
    return [left, top, right - left, foot - top];
  }

  cells(item) {
    const [, map, row, column] = this.at(item), cell = map.cells[item - map.first], { relative } = this.about;
    const told = relative ? `${this.value(cell)} times the layer\u2019s mean` : row === column ? "stays on the GPU" : `${cell} tokens, ${FORMATS.bytes(cell * this.shown.scale)}`;
    return [map.title, `${map.row} ${row}`, `${map.column} ${column}`, told];
  }

  words(item) {
    const [title, row, column, told] = this.cells(item);
    return `${title}\n${row}${this.about.relative ? ", " : " to "}${column}\n${told}`;
  }

  step(item, key) {
    const [number, map, row, column] = this.at(item), by = key === "Right" || key === "Down" ? 1 : -1;
    if (key === "Up" || key === "Down") return map.first + ((row + by + map.rows) % map.rows) * map.columns + column;
    if (column + by >= 0 && column + by < map.columns) return item + by;
    const next = this.maps[(number + by + this.maps.length) % this.maps.length];
    return next.first + Math.min(row, next.rows - 1) * next.columns + (by > 0 ? 0 : next.columns - 1);
  }

  table() {
    const last = this.maps[this.maps.length - 1], rows = Array.from({ length: last.first + last.cells.length }, (_, item) => item < MOST_ROWS && this.cells(item));
    return [["map", "row", "column", "value"], rows];
  }
}
