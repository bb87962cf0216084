// What a reader has chosen, and who is told of a change.

const state = {
  axis: "step", // or "tokens", "time"
  smoothing: 0, // 0 to 0.99: weight of the past in an exponential mean
  hidden: new Set(), // indices of runs
  view: null, // [low, high] on the x axis, null for all
};
const listeners = [];

function onChange(listener) {
  listeners.push(listener);
}

function change(patch) {
  if ("axis" in patch && patch.axis !== state.axis) patch.view = null;
  Object.assign(state, patch);
  for (const listener of listeners) listener();
}

function toggleRun(index) {
  const hidden = new Set(state.hidden);
  if (!hidden.delete(index)) hidden.add(index);
  change({ hidden });
}

// Shows one run alone, or all again when it is alone.
function onlyRun(index) {
  const others = data.runs.map((_, other) => other).filter((other) => other !== index);
  const isAlone = !state.hidden.has(index) && others.every((other) => state.hidden.has(other));
  change({ hidden: new Set(isAlone ? [] : others) });
}

// Zooms by `factor` (below 1: closer) about `center`, within all there is.
function zoom(factor, center = null) {
  const [first, last] = fullView();
  const [low, high] = state.view ?? [first, last];
  const middle = center ?? (low + high) / 2;
  setView(middle - (middle - low) * factor, middle + (high - middle) * factor);
}

// Moves the view by `part` of its width.
function pan(part) {
  if (!state.view) return;
  const [first, last] = fullView();
  const [low, high] = state.view;
  const by = Math.min(Math.max((high - low) * part, first - low), last - high);
  setView(low + by, high + by);
}

function setView(low, high) {
  const [first, last] = fullView();
  const least = (last - first) * 1e-5;
  if (high - low < least) return;
  const isAll = low <= first && high >= last;
  change({ view: isAll ? null : [Math.max(low, first), Math.min(high, last)] });
}
