// Fields with a value for each layer or rank: all of them now, and each of them over the run.

const MAX_MAPS = 4; // runs whose maps are shown below each other
const PROFILE_HEIGHT = 170;
const lists = [];

// Dark blue to yellow in even steps of lightness, readable without red and green.
const COLORS = [
  [48, 18, 92],
  [58, 62, 140],
  [42, 106, 142],
  [33, 145, 140],
  [60, 180, 112],
  [144, 210, 70],
  [248, 226, 60],
];

function heat(part) {
  const at = Math.min(Math.max(part, 0), 1) * (COLORS.length - 1);
  const left = Math.min(Math.floor(at), COLORS.length - 2);
  const mixed = COLORS[left].map((one, i) =>
    Math.round(one + (COLORS[left + 1][i] - one) * (at - left)),
  );
  return `rgb(${mixed.join(",")})`;
}

class ListChart {
  constructor(field) {
    this.field = field;
    this.shown = data.fields[field];
    this.isLog = this.shown.log;
    this.isNear = true;
    this.isStale = true;
    this.plot = el("div", { class: "plot", role: "img", tabindex: 0 });
    this.entry = null; // the one that is read
    this.maps = el("div", { class: "maps" });
    this.box = el("div", { class: "readout", hidden: true });
    this.logButton = el("button", { type: "button", class: "small", onclick: () => this.setLog() });
    this.logButton.textContent = "log";
    this.when = el("p", { class: "quiet doc" });
    this.figure = el(
      "figure",
      { class: "chart", "data-field": field },
      el(
        "figcaption",
        {},
        el("h3", {}, this.shown.title),
        el("span", { class: "tools" }, this.logButton),
        this.when,
      ),
      el("div", { class: "holder" }, this.plot, this.maps, this.box),
    );
    this.plot.addEventListener("pointermove", (event) => {
      if (!this.x) return;
      this.readEntry(this.x.invert(event.clientX - this.plot.getBoundingClientRect().left), false);
    });
    for (const type of ["pointerleave", "blur"])
      this.plot.addEventListener(type, () => this.readEntry(null, false));
    this.plot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (by && this.labels) this.readEntry(this.entry === null ? 0 : this.entry + by, true);
    });
    lists.push(this);
    new ResizeObserver(() => this.refresh()).observe(this.plot);
    listWatcher.observe(this.figure);
  }

  setLog(isLog = !this.isLog) {
    this.isLog = isLog;
    this.refresh();
  }

  refresh() {
    this.isStale = true;
    if (this.isNear) this.draw();
  }

  // The lists of the runs that are shown, with the x of each row.
  shownLists() {
    return data.runs.flatMap((run, index) => {
      const list = run.lists[this.field];
      const axis = list && isShown(index) && axisOf(run, list.axis);
      return axis ? [{ run, index, list, xs: list.at.map((at) => axis[at]) }] : [];
    });
  }

  draw() {
    const width = Math.round(this.plot.clientWidth);
    if (width < 40) return;
    this.isStale = false;
    this.logButton.setAttribute("aria-pressed", this.isLog);
    this.width = width;
    this.drawn = this.shownLists();
    this.range = this.rangeOf(this.drawn);
    this.labels = this.drawn.reduce(
      (most, { list }) => (list.labels.length > most.length ? list.labels : most),
      [],
    );
    this.drawProfile();
    const withRows = this.drawn.filter(({ list }) => list.rows.length > 1);
    const mapped = withRows.slice(0, MAX_MAPS);
    const left = withRows.length - mapped.length;
    const note = `${plural(left, "more run")}: hide some of these to see the maps`;
    const isDrawn = this.range && mapped.length > 0;
    this.maps.replaceChildren(
      ...(isDrawn ? mapped.map((one) => this.map(one)) : []),
      ...(isDrawn && left ? [el("p", { class: "quiet" }, note)] : []),
      ...(isDrawn ? [this.ramp()] : []),
    );
  }

  rangeOf(drawn) {
    let [low, high] = [Infinity, -Infinity];
    for (const { list } of drawn)
      for (const row of list.rows)
        for (const value of row)
          if (value !== null && (!this.isLog || value > 0))
            [low, high] = [Math.min(low, value), Math.max(high, value)];
    return low <= high ? [low, high] : null;
  }

  // Of each run the row under the cursor, or the newest.
  drawProfile() {
    if (!this.drawn) return;
    const { width, labels } = this;
    // Ranks have no order that a line could follow, but many bars are thinner than one.
    const isRanks = labels.every((label) => /^\d+$/.test(label));
    const isBars = isRanks && labels.length * this.drawn.length <= 64;
    const [low, high] = padded(...(this.range ?? [1, 1]), this.isLog);
    const floor = isBars && !this.isLog ? Math.min(0, low) : low;
    const bottom = PROFILE_HEIGHT - MARGIN.bottom;
    const y = (this.isLog ? logScale : linearScale)(floor, high, bottom, MARGIN.top);
    const x = linearScale(
      -0.5,
      Math.max(0.5, labels.length - 0.5),
      MARGIN.left,
      width - MARGIN.right,
    );
    this.x = x;
    const marks = this.drawn.flatMap((one, order) =>
      isBars ? this.bars(one, order, x, y, bottom) : this.trace(one, x, y),
    );
    this.plot.replaceChildren(
      svg(
        "svg",
        { viewBox: `0 0 ${width} ${PROFILE_HEIGHT}`, height: PROFILE_HEIGHT },
        this.axes(x, y, bottom),
        ...(this.range ? marks : []),
      ),
    );
    const when = this.drawn.length && cursorX !== null ? "at the cursor" : "newest";
    this.when.textContent = `${this.shown.doc ? `${this.shown.doc}; ` : ""}${when}`;
    this.plot.setAttribute(
      "aria-label",
      `${this.shown.title}, ${plural(labels.length, "value")}, ${when}`,
    );
  }

  // Shows the values of one entry of the profile, and says them to who uses the keyboard.
  readEntry(place, isSaid) {
    const last = (this.labels?.length ?? 0) - 1;
    const isNone = place === null || last < 0;
    this.entry = isNone ? null : Math.min(Math.max(Math.round(place), 0), last);
    this.box.hidden = isNone;
    if (isNone) return;
    const name = this.field.endsWith("by_rank") ? "rank " : "";
    const label = `${name}${this.labels[this.entry]}`;
    const values = this.drawn.map((one) => [
      one,
      words(this.rowOf(one)[this.entry], this.shown.format, 4),
    ]);
    const rows = values.map(([one, value]) =>
      el(
        "tr",
        {},
        el("td", {}, swatch(one.index)),
        el("td", {}, one.run.name),
        el("td", { class: "value" }, value),
      ),
    );
    this.box.replaceChildren(el("p", {}, label), el("table", {}, ...rows));
    this.placeBox(this.x(this.entry), 6);
    if (isSaid)
      say(`${label}: ${values.map(([one, value]) => `${one.run.name} ${value}`).join(", ")}`);
  }

  placeBox(x, top) {
    placeBox(this.box, x, this.width);
    this.box.style.top = `${top}px`;
  }

  axes(x, y, bottom) {
    const every = Math.max(1, Math.ceil(this.labels.length / Math.max(2, this.width / 74)));
    return svg(
      "g",
      { class: "axes" },
      ...yAxis(y, this.shown.format, this.width),
      svg("line", {
        class: "base",
        x1: MARGIN.left,
        x2: this.width - MARGIN.right,
        y1: bottom,
        y2: bottom,
      }),
      ...this.labels.flatMap((label, i) =>
        i % every
          ? []
          : [
              svg(
                "text",
                {
                  x: x(i),
                  y: bottom + 18,
                  "text-anchor": "middle",
                },
                shortLabel(label),
              ),
            ],
      ),
    );
  }

  rowOf({ list, xs }) {
    return (
      list.rows[cursorX === null ? list.rows.length - 1 : Math.max(0, nearest(xs, cursorX))] ?? []
    );
  }

  trace(one, x, y) {
    const points = this.rowOf(one).flatMap((value, i) => {
      const at = value === null ? NaN : y(value);
      return Number.isFinite(at) ? [[x(i), at]] : [];
    });
    const stroke = colorOf(one.index);
    const d = points
      .map(([px, py], i) => `${i ? "L" : "M"}${px.toFixed(1)},${py.toFixed(1)}`)
      .join("");
    return [
      svg("path", { class: "line", d, stroke, "stroke-dasharray": dashOf(one.index) || null }),
      ...points
        .slice(0, 60)
        .map(([px, py]) => svg("circle", { cx: px, cy: py, r: 2.6, fill: stroke })),
    ];
  }

  bars(one, order, x, y, bottom) {
    const slot = (x(1) - x(0)) * 0.76;
    const wide = Math.min(28, slot / this.drawn.length);
    const left = -(wide * this.drawn.length) / 2 + order * wide;
    return this.rowOf(one).flatMap((value, i) => {
      const top = value === null ? NaN : y(value);
      if (!Number.isFinite(top)) return [];
      return [
        svg("rect", {
          x: x(i) + left,
          width: Math.max(0.5, wide - 1),
          y: Math.min(top, bottom),
          height: Math.abs(bottom - top),
          fill: colorOf(one.index),
          rx: Math.min(2, wide / 4),
        }),
      ];
    });
  }

  // Time to the right, a line of cells for each entry, the first at the top.
  map(one) {
    const { list, xs, run, index } = one;
    const ratio = window.devicePixelRatio || 1;
    const height = Math.max(
      12,
      Math.min(110, list.labels.length * (list.labels.length > 12 ? 4 : 12)),
    );
    const inner = this.width - MARGIN.left - MARGIN.right;
    const canvas = el("canvas", {
      width: inner * ratio,
      height: height * ratio,
      role: "img",
      "aria-label": `${this.shown.title} of ${run.name} over the run`,
    });
    canvas.style.height = `${height}px`;
    const paint = canvas.getContext("2d");
    paint.scale(ratio, ratio);
    const x = linearScale(...(state.view ?? fullView()), 0, inner);
    const each = height / list.labels.length;
    const part = this.part();
    list.rows.forEach((row, i) => {
      const from = i ? (x(xs[i - 1]) + x(xs[i])) / 2 : x(xs[i]) - 2;
      const to = i + 1 < xs.length ? (x(xs[i]) + x(xs[i + 1])) / 2 : x(xs[i]) + 2;
      row.forEach((value, k) => {
        if (value === null || (this.isLog && value <= 0)) return;
        paint.fillStyle = heat(part(value));
        paint.fillRect(from, k * each, Math.max(to - from, 1) + 0.5, each + 0.5);
      });
    });
    canvas.addEventListener("pointermove", (event) => this.read(one, x, each, event));
    canvas.addEventListener("pointerleave", () => {
      this.box.hidden = true;
    });
    return el("div", { class: "map" }, el("p", {}, swatch(index), ` ${run.name}`), canvas);
  }

  // What the colours of the maps mean.
  ramp() {
    const strip = el("canvas", { width: 70, height: 1, "aria-hidden": "true" });
    const paint = strip.getContext("2d");
    for (let i = 0; i < 70; i += 1) {
      paint.fillStyle = heat(i / 69);
      paint.fillRect(i, 0, 1, 1);
    }
    const [low, high] = this.range.map((value) => words(value, this.shown.format, 3));
    return el("p", { class: "ramp" }, low, strip, high);
  }

  part() {
    const [low, high] = this.isLog ? this.range.map(Math.log10) : this.range;
    return (value) => ((this.isLog ? Math.log10(value) : value) - low) / (high - low || 1);
  }

  read({ list, xs, run }, x, each, event) {
    const place = event.target.getBoundingClientRect();
    const i = nearest(xs, x.invert(event.clientX - place.left));
    const k = Math.min(
      list.labels.length - 1,
      Math.max(0, Math.floor((event.clientY - place.top) / each)),
    );
    const outer = this.figure.querySelector(".holder").getBoundingClientRect();
    this.box.hidden = false;
    const { title, format } = AXES[state.axis];
    this.box.replaceChildren(
      el("p", {}, `${title} ${state.axis === "step" ? whole(xs[i]) : words(xs[i], format)}`),
      el(
        "p",
        {},
        `${run.name}, ${list.labels[k]}: ${words(list.rows[i][k], this.shown.format, 4)}`,
      ),
    );
    this.placeBox(event.clientX - outer.left, place.top - outer.top - 8);
  }
}

// "blocks.11" is read as 11 between "embed" and "head".
function shortLabel(label) {
  const short = label.replace(/^(blocks|layers)\.(\d+)$/, "$2");
  return short.length > 9 ? `${short.slice(0, 8)}\u2026` : short;
}

const listWatcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const list = lists.find((one) => one.figure === entry.target);
      if (!list) continue;
      list.isNear = entry.isIntersecting;
      if (list.isNear && list.isStale) list.draw();
    }
  },
  { rootMargin: "400px" },
);
