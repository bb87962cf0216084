// One chart: the lines of a field, of every run that is shown, on the common x axis.

const FEW_POINTS = 40; // up to so many a line shows its points
const charts = [];

class Chart {
  // `fields`: the names of those drawn here, the first solid, the others dashed.
  constructor(fields) {
    this.fields = fields;
    this.shown = data.fields[fields[0]];
    this.isLog = this.shown.log;
    this.isWide = false;
    this.isNear = true; // in the window or next to it
    this.isStale = true;
    this.plot = el("div", { class: "plot", tabindex: 0, role: "img" });
    this.box = el("div", { class: "readout", hidden: true });
    this.logButton = el("button", { type: "button", class: "small", onclick: () => this.setLog() });
    this.logButton.textContent = "log";
    this.wideButton = el("button", {
      type: "button",
      class: "small",
      onclick: () => this.setWide(),
    });
    this.wideButton.textContent = "wide";
    this.figure = this.frame();
    charts.push(this);
    new ResizeObserver(() => this.refresh()).observe(this.plot);
    watchNear(this);
    addReadout(this);
  }

  frame() {
    const lines = this.fields.map((name, i) =>
      el("span", { class: i ? "key dashed" : "key" }, data.fields[name].title),
    );
    const caption = el(
      "figcaption",
      {},
      el("h3", {}, this.shown.title),
      el("span", { class: "tools" }, this.logButton, this.wideButton),
      this.fields.length > 1 ? el("p", { class: "keys" }, ...lines) : null,
      this.shown.doc ? el("p", { class: "quiet doc" }, this.shown.doc) : null,
    );
    return el(
      "figure",
      { class: "chart", "data-field": this.fields[0] },
      caption,
      el("div", { class: "holder" }, this.plot, this.box),
    );
  }

  setLog(isLog = !this.isLog) {
    this.isLog = isLog;
    this.refresh();
  }

  setWide() {
    this.isWide = !this.isWide;
    this.figure.classList.toggle("wide", this.isWide);
  }

  // Draws now, or once the chart comes near the window.
  refresh() {
    this.isStale = true;
    if (this.isNear) this.draw();
  }

  lines() {
    return this.fields.flatMap((field, order) =>
      data.runs
        .map((run, index) => ({ run, index, field, order, line: lineOf(index, field) }))
        .filter((one) => one.line && isShown(one.index)),
    );
  }

  draw() {
    const width = Math.round(this.plot.clientWidth);
    if (width < 40) return;
    this.isStale = false;
    this.logButton.setAttribute("aria-pressed", this.isLog);
    this.wideButton.setAttribute("aria-pressed", this.isWide);
    const height = this.isWide ? 380 : 232;
    const lines = this.lines();
    const view = state.view ?? fullView();
    const range = this.range(lines, view);
    const [low, high] = padded(...(range ?? [1, 1]), this.isLog);
    this.x = linearScale(...view, MARGIN.left, width - MARGIN.right);
    this.y = (this.isLog ? logScale : linearScale)(low, high, height - MARGIN.bottom, MARGIN.top);
    this.size = [width, height];
    this.drawn = range ? lines : [];
    this.overlay = svg("g", { class: "cursor" });
    const clip = `clip-${charts.indexOf(this)}`;
    this.plot.replaceChildren(
      svg(
        "svg",
        { viewBox: `0 0 ${width} ${height}`, height },
        svg(
          "clipPath",
          { id: clip },
          svg("rect", {
            x: MARGIN.left,
            y: MARGIN.top - 4,
            width: width - MARGIN.left - MARGIN.right + 4,
            height: height - MARGIN.top - MARGIN.bottom + 5,
          }),
        ),
        this.axes(width, height),
        svg("g", { "clip-path": `url(#${clip})` }, ...this.drawn.flatMap((one) => this.marks(one))),
        ...this.verdictMarks(height - MARGIN.bottom),
        range ? null : this.emptyText(lines, width, height),
        this.overlay,
      ),
    );
    this.plot.setAttribute("aria-label", this.label(range));
  }

  // Smallest and largest value in view, null where there is none.
  range(lines, [from, to]) {
    let [low, high] = [Infinity, -Infinity];
    for (const { line } of lines) {
      const end = firstAtLeast(line.xs, to + (to - from) * 1e-9);
      for (let i = firstAtLeast(line.xs, from - (to - from) * 1e-9); i < end; i += 1) {
        const [least, most] = line.low ? [line.low[i], line.high[i]] : [line.ys[i], line.ys[i]];
        if (!this.isLog || least > 0) low = Math.min(low, least);
        else if (line.ys[i] > 0) low = Math.min(low, line.ys[i]);
        if (!this.isLog || most > 0) high = Math.max(high, most);
      }
    }
    return low <= high ? [low, high] : null;
  }

  axes(width, height) {
    const bottom = height - MARGIN.bottom;
    const { format } = this.shown;
    const across = this.x.ticks(Math.max(2, width / 110), AXES[state.axis].format);
    return svg(
      "g",
      { class: "axes" },
      ...yAxis(this.y, format, width),
      svg("line", {
        class: "base",
        x1: MARGIN.left,
        x2: width - MARGIN.right,
        y1: bottom,
        y2: bottom,
      }),
      svg(
        "text",
        { x: MARGIN.left - 8, y: bottom + 18, "text-anchor": "end" },
        AXES[state.axis].title.toLowerCase(),
      ),
      ...across.map((tick, i) =>
        svg(
          "text",
          {
            x: this.x(tick),
            y: bottom + 18,
            "text-anchor": this.anchor(tick, width),
          },
          words(tick, AXES[state.axis].format, 6),
        ),
      ),
    );
  }

  // A label at the right edge ends there, so that none is cut.
  anchor(tick, width) {
    return this.x(tick) > width - MARGIN.right - 18 ? "end" : "middle";
  }

  marks({ index, line, order }) {
    const stroke = colorOf(index);
    const dash = order ? "5 4" : dashOf(index);
    const [first, last] = this.inView(line);
    const found = [];
    if (line.low && !line.smooth)
      found.push(
        svg("path", { class: "band", d: this.band(line, first, last), fill: stroke, stroke }),
      );
    if (line.smooth)
      found.push(
        svg("path", { class: "raw", d: this.path(line.xs, line.ys, first, last), stroke }),
      );
    const ys = line.smooth ?? line.ys;
    found.push(
      svg("path", {
        class: "line",
        d: this.path(line.xs, ys, first, last),
        stroke,
        "stroke-dasharray": dash || null,
      }),
    );
    if (last - first <= FEW_POINTS)
      found.push(
        svg("path", { class: "points", d: this.dots(line.xs, ys, first, last), fill: stroke }),
      );
    for (const x of line.bad)
      found.push(svg("text", { class: "bad", x: this.x(x), y: MARGIN.top + 8 }, "\u00d7"));
    return found;
  }

  // Indices of the points in view and one more on each side.
  inView(line) {
    const [from, to] = this.x.domain;
    return [
      Math.max(0, firstAtLeast(line.xs, from) - 1),
      Math.min(line.xs.length, firstAtLeast(line.xs, to) + 2),
    ];
  }

  path(xs, ys, first, last) {
    const parts = [];
    let pen = "M";
    for (let i = first; i < last; i += 1) {
      const y = this.y(ys[i]);
      if (Number.isFinite(y)) parts.push(`${pen}${this.x(xs[i]).toFixed(1)},${y.toFixed(1)}`);
      pen = Number.isFinite(y) ? "L" : "M";
    }
    return parts.join("");
  }

  band(line, first, last) {
    const floor = this.y.domain[0];
    const edge = (values) => {
      const parts = [];
      for (let i = first; i < last; i += 1)
        parts.push(
          `${this.x(line.xs[i]).toFixed(1)},${this.y(
            this.isLog ? Math.max(values[i], floor) : values[i],
          ).toFixed(1)}`,
        );
      return parts;
    };
    if (last <= first) return "";
    return `M${[...edge(line.high), ...edge(line.low).reverse()].join("L")}Z`;
  }

  dots(xs, ys, first, last) {
    const parts = [];
    for (let i = first; i < last; i += 1) {
      const y = this.y(ys[i]);
      if (Number.isFinite(y))
        parts.push(
          `M${(this.x(xs[i]) - 2.2).toFixed(1)},${y.toFixed(1)}` +
            "a2.2,2.2 0 1,0 4.4,0a2.2,2.2 0 1,0 -4.4,0",
        );
    }
    return parts.join("");
  }

  // A diamond on the x axis where a run got a verdict.
  verdictMarks(y) {
    const marks = [];
    for (const { index, run, verdict } of verdicts()) {
      const x = isShown(index) ? placeOf(run, verdict.step) : null;
      if (x === null || x < this.x.domain[0] || x > this.x.domain[1]) continue;
      marks.push(
        svg("path", {
          class: `verdict ${severityOf(verdict)}`,
          d: `M${this.x(x)},${y - 5}l4,5l-4,5l-4,-5Z`,
        }),
      );
    }
    return marks.slice(0, 100);
  }

  emptyText(lines, width, height) {
    const why = !lines.length
      ? "no run that is shown has this"
      : this.isLog
        ? "nothing above 0 in view: turn log off"
        : "nothing in view";
    return svg(
      "text",
      { class: "empty", x: width / 2, y: height / 2, "text-anchor": "middle" },
      why,
    );
  }

  label(range) {
    if (!range) return `${this.shown.title}: nothing to show`;
    const [low, high] = range.map((value) => words(value, this.shown.format));
    return (
      `${this.shown.title} over ${AXES[state.axis].title.toLowerCase()}, ${low} to ${high}, ` +
      `${plural(new Set(this.drawn.map((one) => one.index)).size, "run")}. ` +
      "Arrows read values, plus and minus zoom, 0 shows all."
    );
  }
}

const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const chart = charts.find((one) => one.figure === entry.target);
      if (!chart) continue;
      chart.isNear = entry.isIntersecting;
      if (chart.isNear && chart.isStale) chart.draw();
    }
  },
  { rootMargin: "400px" },
);

function watchNear(chart) {
  watcher.observe(chart.figure);
}
