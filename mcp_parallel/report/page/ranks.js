// Who is where: a picture of the ranks, and what each of them holds.

// Colours for the parts of memory and for pipeline work: not those of runs.
const partColor = (index) => `var(--part-${index % 8})`;

function layoutSection() {
  const pictures = distinct((run) => run.facts && JSON.stringify(run.facts.layout));
  return pictures.map(({ runs, indices }) => {
    const { layout, world_size: ranks, microbatches } = runs[0].facts;
    const degrees = [
      ["dp", layout.dp],
      ["tp", layout.tp],
      ["pp", layout.pp],
      ["cp", layout.cp],
    ];
    const product = degrees
      .filter(([, n]) => n > 1)
      .map(([name, n]) => `${name} ${n}`)
      .join(" \u00d7 ");
    const zero = layout.zero && layout.dp * layout.cp > 1 ? `, ZeRO ${layout.zero}` : "";
    const schedule = layout.pp > 1 ? `, ${layout.schedule}` : "";
    return el(
      "article",
      { class: "panel" },
      runLabels(indices),
      el(
        "p",
        { class: "lead" },
        `${plural(ranks, "rank")}${product ? ` = ${product}` : ""}${zero}${schedule}, ` +
          `${plural(microbatches, "micro-batch").replace("batchs", "batches")} a step`,
      ),
      stages(layout, runs[0]),
    );
  });
}

// Runs that have the same of something, in groups; runs without it are left out.
function distinct(keyOf) {
  const groups = new Map();
  data.runs.forEach((run, index) => {
    const key = keyOf(run);
    if (!key) return;
    if (!groups.has(key)) groups.set(key, { runs: [], indices: [] });
    groups.get(key).runs.push(run);
    groups.get(key).indices.push(index);
  });
  return [...groups.values()];
}

function runLabels(indices) {
  return el(
    "p",
    { class: "labels" },
    ...indices.map((index) => el("span", { class: "label" }, swatch(index), data.runs[index].name)),
  );
}

const MAX_COLUMNS = 8; // cells next to each other

function stages(layout, run) {
  const { shown } = layout;
  const memory = newest(run, "memory_bytes_by_rank");
  const parts = layout.ranks.flatMap((replicas, i) => {
    const missing = i ? shown.pp[i] - shown.pp[i - 1] - 1 : 0;
    return [...gap(missing, "more pipeline ranks"), stage(run, i, replicas, memory)];
  });
  const found = el("div", { class: "stages" }, ...parts);
  const width = Math.max(18, 3.1 * Math.min(layout.tp, MAX_COLUMNS) + 6);
  found.style.gridTemplateColumns = `repeat(auto-fill, minmax(min(100%, ${width}rem), 1fr))`;
  return found;
}

function stage(run, i, replicas, memory) {
  const { layout, stage_costs: costs, imbalance } = run.facts;
  const { shown } = layout;
  const pp = shown.pp[i];
  const title = layout.pp > 1 ? `Pipeline rank ${pp}` : "All layers on every rank";
  const work =
    layout.pp > 1 && imbalance > 0.005 ? `, ${words(costs[pp], "share")} of the work` : "";
  const rows = replicas.flatMap((ranks, d) => {
    const missing = shown.dp[d] - (d ? shown.dp[d - 1] : -1) - 1;
    return [...gap(missing, "more replicas"), replica(layout, i, d, ranks, memory)];
  });
  return el(
    "section",
    { class: "stage" },
    el("h4", {}, title, el("span", { class: "quiet" }, ` ${layerWords(layout.layers[i])}${work}`)),
    el("div", { class: "replicas" }, ...rows),
  );
}

function gap(missing, noun) {
  return missing > 0 ? [el("p", { class: "gap" }, `${whole(missing)} ${noun}`)] : [];
}

function layerWords(ranges) {
  const words = ranges
    .filter(([from, to]) => to > from)
    .map(([from, to]) => (to - from === 1 ? `${from}` : `${from}\u2013${to - 1}`));
  return words.length ? `layers ${words.join(", ")}` : "no layers";
}

function replica(layout, i, d, ranks, memory) {
  const [pp, dp] = [layout.shown.pp[i], layout.shown.dp[d]];
  const cells = ranks.map((rank, k) => {
    const [cp, tp] = [Math.floor(k / layout.tp), k % layout.tp];
    const held = memory && memory[rank] ? `, ${words(memory[rank], "bytes", 3)}` : "";
    const place = `rank ${rank}: pp ${pp}, dp ${dp}, cp ${cp}, tp ${tp}${held}`;
    const cell = el("li", { class: "rank", title: place }, `${rank}`, cellNote(layout, cp, tp));
    cell.style.background = `color-mix(in srgb, ${partColor(pp)} 24%, var(--panel))`;
    return cell;
  });
  const list = el("ol", { class: "ranks" }, ...cells);
  list.style.gridTemplateColumns = `repeat(${Math.min(layout.tp, MAX_COLUMNS)}, minmax(0, 3.4rem))`;
  const share = layout.shares ? ` \u00d7${layout.shares[d]}` : "";
  const title = layout.shares ? plural(layout.shares[d], "micro-batch") : null;
  const name = layout.dp > 1 ? el("span", { class: "name", title }, `dp ${dp}${share}`) : null;
  return el("div", { class: "replica" }, name, list);
}

function cellNote(layout, cp, tp) {
  const parts = [layout.cp > 1 ? `cp ${cp}` : "", layout.tp > 1 ? `tp ${tp}` : ""];
  const text = parts.filter(Boolean).join(" ");
  return text ? el("small", {}, text) : null;
}

// The newest row of a list field, null where it was not recorded.
function newest(run, field) {
  const rows = run.lists[field]?.rows;
  return rows && rows.length ? rows[rows.length - 1] : null;
}

// Predicted memory of each pipeline rank by part, and what was measured of its ranks.
function memorySection() {
  const runs = data.runs.filter((run) => run.facts?.memory);
  if (!runs.length) return [];
  const names = partNames(runs);
  const most = Math.max(
    ...runs.flatMap((run) => [
      ...run.facts.memory.map((one) => one.peak_bytes),
      ...run.memory_by_pp,
    ]),
  );
  return [
    el(
      "article",
      { class: "panel" },
      el(
        "p",
        { class: "lead" },
        "Predicted peak of a rank by part, before the first step. A resident set " +
          "on a CPU also holds Python, libraries and caches.",
      ),
      el(
        "ul",
        { class: "legend" },
        ...names.map((name, i) => el("li", {}, dot(partColor(i)), name)),
      ),
      ...runs.map((run) => memoryOf(run, names, most)),
    ),
  ];
}

function partNames(runs) {
  const sums = new Map();
  for (const run of runs)
    for (const { parts } of run.facts.memory)
      for (const [name, bytes] of Object.entries(parts))
        if (bytes) sums.set(name, (sums.get(name) ?? 0) + bytes);
  return [...sums.keys()].sort((a, b) => sums.get(b) - sums.get(a));
}

function memoryOf(run, names, most) {
  const rows = run.facts.memory.slice(0, 32).flatMap((one, pp) => {
    const parts = names
      .filter((name) => one.parts[name])
      .map((name) => [
        partColor(names.indexOf(name)),
        one.parts[name],
        `${name} ${words(one.parts[name], "bytes", 3)}`,
      ]);
    const predicted = bar(pp, run, "predicted", one.peak_bytes, most, parts);
    const held = run.memory_by_pp[pp];
    if (!held) return [predicted];
    const whole = [["var(--quiet)", held, "largest of its ranks, newest sample"]];
    return [predicted, bar(pp, run, "measured", held, most, whole)];
  });
  return el("div", {}, runLabels([data.runs.indexOf(run)]), el("div", { class: "bars" }, ...rows));
}

function bar(pp, run, kind, total, most, parts) {
  const strip = el(
    "span",
    { class: "strip" },
    ...parts.map(([color, bytes, title]) => {
      const part = el("i", { title });
      part.style.width = `${(100 * bytes) / most}%`;
      part.style.background = color;
      return part;
    }),
  );
  const name = run.facts.memory.length > 1 ? `pp ${pp} ${kind}` : kind;
  return el(
    "div",
    { class: "bar-row" },
    el("span", { class: "name" }, name),
    strip,
    el("span", { class: "value" }, words(total, "bytes", 3)),
  );
}

function dot(color) {
  const found = el("i", { class: "dot" });
  found.style.background = color;
  return found;
}
