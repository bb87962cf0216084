// Reading values off charts, and moving in them: pointer, wheel and keyboard.

let cursorX = null;
let waiting = false;

// Puts the cursor of every chart at x; `source` also says what is there.
function setCursor(x, source = null) {
  cursorX = x;
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const chart of charts)
      if (chart.isNear && chart.overlay) drawCursor(chart, chart === source);
    for (const list of lists) if (list.isNear) list.drawProfile();
  });
}

// Of each line its point nearest to x, or none where that is far off.
function pointsAt(chart, x) {
  return chart.drawn.flatMap((one) => {
    const i = nearest(one.line.xs, x);
    const isNear = i >= 0 && Math.abs(chart.x(one.line.xs[i]) - chart.x(x)) < 40;
    return isNear
      ? [{ ...one, i, at: one.line.xs[i], y: (one.line.smooth ?? one.line.ys)[i] }]
      : [];
  });
}

function drawCursor(chart, isSource) {
  const [from, to] = chart.x.domain;
  const isIn = cursorX !== null && cursorX >= from && cursorX <= to;
  const points = isIn ? pointsAt(chart, cursorX) : [];
  chart.box.hidden = !isSource || !points.length;
  if (!isIn) return chart.overlay.replaceChildren();
  const x = chart.x(cursorX);
  chart.overlay.replaceChildren(
    svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: chart.size[1] - MARGIN.bottom }),
    ...points
      .filter((one) => Number.isFinite(chart.y(one.y)))
      .map((one) =>
        svg("circle", {
          cx: chart.x(one.at),
          cy: chart.y(one.y),
          r: 3.5,
          fill: colorOf(one.index),
        }),
      ),
  );
  if (!chart.box.hidden) fillBox(chart, points, x);
}

function fillBox(chart, points, x) {
  const { format } = chart.shown;
  const rows = points.map((one) => {
    const { low, high } = one.line;
    const isBand = low && high[one.i] > low[one.i];
    const range = isBand ? ` (${words(low[one.i], format)} to ${words(high[one.i], format)})` : "";
    return el(
      "tr",
      {},
      el("td", {}, swatch(one.index, one.order)),
      el(
        "td",
        {},
        one.order ? `${one.run.name}, ${data.fields[one.field].title.toLowerCase()}` : one.run.name,
      ),
      el("td", { class: "value" }, `${words(one.y, format, 5)}${range}`),
    );
  });
  chart.box.replaceChildren(
    el("p", {}, axisWords(points)),
    el("table", {}, ...rows),
    ...verdictsNear(chart).map((text) => el("p", { class: "told" }, text)),
  );
  placeBox(chart.box, x, chart.size[0]);
}

// Beside x, on the side where a plot of that width has more room.
function placeBox(box, x, width) {
  const isRight = x > width / 2;
  box.style.left = isRight ? "auto" : `${x + 12}px`;
  box.style.right = isRight ? `${width - x + 12}px` : "auto";
  box.style.maxWidth = `min(26rem, ${Math.round((isRight ? x : width - x) - 16)}px)`;
}

function axisWords(points) {
  const { title, format } = AXES[state.axis];
  const at = points[0].at;
  return `${title} ${state.axis === "step" ? whole(at) : words(at, format, 5)}`;
}

function verdictsNear(chart) {
  return verdicts()
    .filter(({ index, run, verdict }) => {
      const x = isShown(index) ? placeOf(run, verdict.step) : null;
      return x !== null && Math.abs(chart.x(x) - chart.x(cursorX)) < 5;
    })
    .slice(0, 3)
    .map(({ verdict }) => titleOf(verdict));
}

function addReadout(chart) {
  const { plot } = chart;
  const xOf = (event) => {
    const pixel = event.clientX - plot.getBoundingClientRect().left;
    return Math.min(Math.max(chart.x.invert(pixel), chart.x.domain[0]), chart.x.domain[1]);
  };
  plot.addEventListener("pointermove", (event) => {
    if (chart.x && !drag) setCursor(xOf(event), chart);
  });
  plot.addEventListener("pointerleave", () => setCursor(null));
  plot.addEventListener("blur", () => setCursor(null));
  plot.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch") setCursor(xOf(event), chart);
    else if (event.button === 0) startDrag(chart, event, xOf);
  });
  plot.addEventListener("dblclick", () => change({ view: null }));
  plot.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // plain wheels scroll the page
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, xOf(event));
    },
    { passive: false },
  );
  plot.addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && press(chart, event))
      event.preventDefault();
  });
}

let drag = null;

// A drag marks what to zoom to; with shift it moves the view.
function startDrag(chart, event, xOf) {
  const { plot } = chart;
  const from = xOf(event);
  drag = { pans: event.shiftKey && state.view, last: event.clientX };
  const mark = svg("rect", {
    class: "brush",
    y: MARGIN.top,
    height: chart.size[1] - MARGIN.top - MARGIN.bottom,
  });
  const over = new AbortController();
  plot.setPointerCapture(event.pointerId);
  const move = (moved) => {
    if (drag.pans) {
      pan((drag.last - moved.clientX) / (chart.size[0] - MARGIN.left - MARGIN.right));
      drag.last = moved.clientX;
      return;
    }
    const [low, high] = [from, xOf(moved)].map((x) => chart.x(x)).sort((a, b) => a - b);
    mark.setAttribute("x", low);
    mark.setAttribute("width", high - low);
    chart.overlay.replaceChildren(mark);
    chart.box.hidden = true;
  };
  const end = (moved) => {
    over.abort();
    const [low, high] = [from, xOf(moved)].sort((a, b) => a - b);
    const isZoom = !drag.pans && chart.x(high) - chart.x(low) > 5 && moved.type === "pointerup";
    drag = null;
    chart.overlay.replaceChildren();
    if (isZoom) setView(low, high);
  };
  plot.addEventListener("pointermove", move, { signal: over.signal });
  plot.addEventListener("pointerup", end, { signal: over.signal });
  plot.addEventListener("pointercancel", end, { signal: over.signal });
}

// Whether the key meant something here.
function press(chart, event) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
  if (event.key in steps) {
    if (event.shiftKey) pan(0.2 * Math.sign(steps[event.key]));
    else moveCursor(chart, steps[event.key]);
  } else if (event.key === "+" || event.key === "=") zoom(0.6, cursorX);
  else if (event.key === "-") zoom(1 / 0.6, cursorX);
  else if (event.key === "0") change({ view: null });
  else if (event.key === "Escape") setCursor(null);
  else if (event.key === "l") chart.setLog();
  else return false;
  return true;
}

// To the next point of the longest line, and say what is there.
function moveCursor(chart, by) {
  const longest = chart.drawn.reduce(
    (best, one) => (one.line.xs.length > (best?.line.xs.length ?? 0) ? one : best),
    null,
  );
  if (!longest) return;
  const { xs } = longest.line;
  const [from, to] = [
    firstAtLeast(xs, chart.x.domain[0]),
    firstAtLeast(xs, chart.x.domain[1] * (1 + 1e-9)) - 1,
  ];
  const i = cursorX === null ? from : nearest(xs, cursorX) + by;
  setCursor(xs[Math.min(Math.max(i, from), Math.max(from, to))], chart);
  const points = pointsAt(chart, cursorX);
  const values = points.map((one) => `${one.run.name} ${words(one.y, chart.shown.format, 5)}`);
  if (points.length) say(`${axisWords(points)}: ${values.join(", ")}`);
}

function say(text) {
  document.getElementById("said").textContent = text;
}

function swatch(index, order = 0) {
  return svg(
    "svg",
    { class: "swatch", viewBox: "0 0 18 10", width: 18, height: 10, "aria-hidden": "true" },
    svg("line", {
      x1: 0,
      x2: 18,
      y1: 5,
      y2: 5,
      stroke: colorOf(index),
      "stroke-width": 3,
      "stroke-dasharray": order ? "4 3" : dashOf(index) || null,
    }),
  );
}
