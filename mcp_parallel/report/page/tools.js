// Elements, and numbers as words.

const SVG = "http://www.w3.org/2000/svg";

// An element with attributes and children; strings become text, never markup.
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const PREFIXES = ["", "k", "M", "G", "T", "P"];
const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const MINUS = "\u2212";

// At most `digits` significant digits, without trailing zeros.
function digitsOf(value, digits = 4) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e7) {
    const [head, power] = value.toExponential(Math.min(digits, 3) - 1).split("e");
    return `${Number(head)}e${Number(power)}`.replaceAll("-", MINUS);
  }
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  const options = { maximumFractionDigits: Math.min(places, 12) };
  return value.toLocaleString("en-US", options).replace("-", MINUS);
}

function withPrefix(value, base, names) {
  let power = 0;
  while (Math.abs(value) >= base * 0.9995 && power < names.length - 1) {
    value /= base;
    power += 1;
  }
  return [value, names[power]];
}

// A value in its unit: share, bytes, seconds, rate or a plain number.
function words(value, format = "number", digits = 4) {
  if (value === null || value === undefined) return "\u2013";
  if (format === "share") return `${digitsOf(value * 100, digits - 1)} %`;
  if (format === "bytes" || format === "rate") {
    const names = format === "bytes" ? BINARY : PREFIXES;
    const [short, unit] = withPrefix(value, format === "bytes" ? 1024 : 1000, names);
    return `${digitsOf(short, digits)} ${unit}`.trim();
  }
  return format === "seconds" ? duration(value, digits) : digitsOf(value, digits);
}

function duration(seconds, digits) {
  const size = Math.abs(seconds);
  if (size !== 0 && size < 1e-3) return `${digitsOf(seconds * 1e6, digits)} \u00b5s`;
  if (size !== 0 && size < 1) return `${digitsOf(seconds * 1e3, digits)} ms`;
  if (size < 120) return `${digitsOf(seconds, digits)} s`;
  const units = size < 7200 ? [60, "min"] : [3600, "h"];
  return `${digitsOf(seconds / units[0], Math.min(digits, 4))} ${units[1]}`;
}

const whole = (value) => Math.round(value).toLocaleString("en-US");

// Words for a count: "1 step", "2 steps".
const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

// First index of a rising array with `values[index] >= wanted`.
function firstAtLeast(values, wanted) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Index of the value nearest to `wanted`, -1 in an empty array.
function nearest(values, wanted) {
  const after = firstAtLeast(values, wanted);
  if (after === 0) return values.length ? 0 : -1;
  if (after === values.length) return after - 1;
  return wanted - values[after - 1] <= values[after] - wanted ? after - 1 : after;
}
