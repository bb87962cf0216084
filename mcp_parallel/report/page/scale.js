// From values to pixels, and where an axis has its ticks.

function linearScale(low, high, from, to) {
  const span = high - low || 1;
  const scale = (value) => from + ((value - low) / span) * (to - from);
  return Object.assign(scale, {
    domain: [low, high],
    invert: (pixel) => low + ((pixel - from) / (to - from || 1)) * span,
    ticks: (count, format) => linearTicks(low, high, count, format),
  });
}

// `low` and `high` are above 0; what is not has no place on it.
function logScale(low, high, from, to) {
  const inner = linearScale(Math.log10(low), Math.log10(high), from, to);
  const scale = (value) => (value > 0 ? inner(Math.log10(value)) : NaN);
  return Object.assign(scale, {
    domain: [low, high],
    invert: (pixel) => 10 ** inner.invert(pixel),
    ticks: (count, format) => logTicks(low, high, count, format),
  });
}

// Steps of 1, 2 or 5 times a power of ten; of bytes in powers of 1024, of time in minutes, hours.
function linearTicks(low, high, count, format) {
  const size = Math.max(Math.abs(low), Math.abs(high));
  let unit = 1;
  if (format === "bytes") while (size >= unit * 1024 && unit < 2 ** 50) unit *= 1024;
  if (format === "seconds" && size >= 120) unit = size < 7200 ? 60 : 3600;
  if (format === "share") unit = 0.01;
  const rough = (high - low) / unit / Math.max(1, count);
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((one) => one * power * 1.5 >= rough) * power;
  const ticks = [];
  const start = Math.ceil(low / unit / step - 1e-9);
  for (let at = start; at * step * unit <= high + step * unit * 1e-9; at += 1)
    ticks.push(Number((at * step).toPrecision(12)) * unit);
  return ticks;
}

function logTicks(low, high, count, format) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / Math.max(2, count)));
  for (const heads of [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let power = first; power <= last; power += every)
      for (const head of heads) {
        const value = Number(`${head}e${power}`);
        if (value >= low * 0.9999 && value <= high * 1.0001) ticks.push(value);
      }
    if (ticks.length < 2) break;
    if (ticks.length <= count * 1.5) return ticks;
  }
  return linearTicks(low, high, count, format);
}

// A short label: there is little room left of an axis.
function tickWords(value, format) {
  if (format !== "number" || Math.abs(value) < 1e5) return words(value, format, 4);
  return value.toExponential().replace("e+", "e").replace("-", MINUS);
}

// A domain with room above and below; of a constant, around it.
function padded(low, high, isLog) {
  if (isLog) {
    const room = (high / low) ** 0.06;
    return high > low * 1.0001 ? [low / room, high * room] : [low / 1.6, high * 1.6];
  }
  const room = (high - low) * 0.06;
  if (room > 0) return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  const around = Math.abs(low) * 0.1 || 1;
  return [low - around, high + around];
}
