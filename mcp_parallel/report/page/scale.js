// From values to pixels, and where an axis has its ticks.

const MARGIN = { left: 58, right: 14, top: 12, bottom: 26 }; // of every plot, so that they align

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

// Powers of ten, and numbers between them where there is room.
function logTicks(low, high, count, format) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / (1.5 * count)));
  let ticks = [];
  for (const heads of every > 1 ? [[1]] : [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    ticks = [];
    for (let power = Math.ceil(first / every) * every; power <= last; power += every)
      for (const head of heads) {
        const value = Number(`${head}e${power}`);
        if (value >= low * 0.9999 && value <= high * 1.0001) ticks.push(value);
      }
    if (ticks.length <= count * 1.5) break;
  }
  return ticks.length > 1 ? ticks : linearTicks(low, high, count, format);
}

// The labels of ticks: short, as there is little room left of an axis, and none like another.
function tickWords(ticks, format) {
  const size = Math.max(...ticks.map(Math.abs));
  if (format === "number" && size >= 1e5)
    return ticks.map((tick) => (tick === 0 ? "0" : powerWords(tick)));
  const step = Math.abs(ticks[1] - ticks[0]) || size || 1;
  const digits = Math.min(9, Math.max(4, Math.ceil(Math.log10(size / step || 1)) + 2));
  return ticks.map((tick) => words(tick, format, digits));
}

function powerWords(value) {
  if (Math.abs(value) < 1e4) return digitsOf(value);
  return Number(value.toPrecision(4)).toExponential().replace("e+", "e").replace("-", MINUS);
}

// The lines across a plot at the ticks of its y axis, and their labels.
function yAxis(scale, format, width) {
  const ticks = scale.ticks(4, format);
  const labels = tickWords(ticks, format);
  const { left, right } = MARGIN;
  return ticks.flatMap((tick, i) => {
    const y = scale(tick);
    const label = { x: left - 8, y: y + 4, "text-anchor": "end" };
    return [
      svg("line", { x1: left, x2: width - right, y1: y, y2: y }),
      svg("text", label, labels[i]),
    ];
  });
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
