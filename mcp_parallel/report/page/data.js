// The document of the page, and lines of it on the chosen axis.

const data = JSON.parse(document.getElementById("data").textContent);
const AXES = {
  step: { title: "Step", format: "number" },
  tokens: { title: "Tokens", format: "rate" },
  time: { title: "Time", format: "seconds" },
};
const isShown = (index) => !state.hidden.has(index);
const colorOf = (index) => `var(--run-${index % 8})`;
const dashOf = (index) => ["", "7 3", "2 3", "9 3 2 3"][Math.floor(index / 8) % 4];

// x of each point of a file on an axis; null where a run does not have that axis.
function axisOf(run, number, name = state.axis) {
  const values = run.axes[number]?.[name];
  return values && values.some((value) => value !== null) ? values : null;
}

const hasAxis = (name) => data.runs.some((run) => run.axes.some((_, i) => axisOf(run, i, name)));

const views = new Map();

// The range of x over all runs, those hidden too, so that showing one moves nothing.
function fullView() {
  if (!views.has(state.axis)) views.set(state.axis, rangeOfAxis());
  return views.get(state.axis);
}

function rangeOfAxis() {
  let [low, high] = [Infinity, -Infinity];
  for (const run of data.runs)
    run.axes.forEach((_, number) => {
      for (const x of axisOf(run, number) ?? [])
        if (x !== null) [low, high] = [Math.min(low, x), Math.max(high, x)];
    });
  return low > high ? [0, 1] : low === high ? [low - 0.5, high + 0.5] : [low, high];
}

const cache = new Map();

// One run's line of a field: {xs, ys, low, high, smooth, bad}, null where it has none.
function lineOf(index, field) {
  const key = `${index} ${state.axis} ${state.smoothing} ${field}`;
  if (!cache.has(key)) {
    if (cache.size > 4000) cache.clear();
    cache.set(key, buildLine(data.runs[index], field));
  }
  return cache.get(key);
}

function buildLine(run, field) {
  const column = run.columns[field];
  const axis = column && axisOf(run, column.axis);
  if (!axis) return null;
  const line = { xs: [], ys: [], low: null, high: null, smooth: null, bad: [] };
  if (column.low) [line.low, line.high] = [[], []];
  column.mean.forEach((value, i) => {
    const x = axis[column.at ? column.at[i] : i];
    if (x === null) return;
    line.xs.push(x);
    line.ys.push(value);
    if (!line.low) return;
    line.low.push(column.low[i]);
    line.high.push(column.high[i]);
  });
  line.bad = (column.bad ?? []).map((at) => axis[at]).filter((x) => x !== null);
  if (state.smoothing > 0) line.smooth = smoothed(line.ys, state.smoothing);
  return line;
}

// Exponential mean without the pull of its start: what is seen so far weighs one in all.
function smoothed(values, weight) {
  let [mean, mass] = [0, 0];
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

// x of a step on the chosen axis.
function placeOf(run, step) {
  const axis = run.axes.length ? axisOf(run, 0) : null;
  const at = axis ? nearest(run.axes[0].step, step) : -1;
  return at < 0 ? null : axis[at];
}
