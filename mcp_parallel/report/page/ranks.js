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

function stages(layout, run) {
  const { shown } = layout;
  const memory = newest(run, "memory_bytes_by_rank");
  const parts = layout.ranks.flatMap((replicas, i) => {
    const gap =
      i && shown.pp[i] > shown.pp[i - 1] + 1
        ? [el("p", { class: "gap" }, `${shown.pp[i] - shown.pp[i - 1] - 1} more pipeline ranks`)]
        : [];
    return [...gap, stage(layout, i, replicas, memory)];
  });
  return el("div", { class: "stages" }, ...parts);
}

function stage(layout, i, replicas, memory) {
  const layers = layout.layers[i]
    .map(([from, to]) =>
      to - from === 1 ? `${from}` : to === from ? "none" : `${from}\u2013${to - 1}`,
    )
    .join(", ");
  const title = layout.pp > 1 ? `Pipeline rank ${layout.shown.pp[i]}` : "All stages on every rank";
  const rows = replicas.flatMap((ranks, d) => {
    const dp = layout.shown.dp[d];
    const before = d ? layout.shown.dp[d - 1] : -1;
    const gap =
      dp > before + 1 ? [el("p", { class: "gap" }, `${whole(dp - before - 1)} more replicas`)] : [];
    return [...gap, replica(layout, layout.shown.pp[i], dp, ranks, memory)];
  });
  return el(
    "section",
    { class: "stage" },
    el("h4", {}, title, el("span", { class: "quiet" }, ` layers ${layers}`)),
    el("div", { class: "replicas" }, ...rows),
  );
}

function replica(layout, pp, dp, ranks, memory) {
  const cells = ranks.map((rank, i) => {
    const [cp, tp] = [Math.floor(i / layout.tp), i % layout.tp];
    const held = memory && memory[rank] ? `, ${words(memory[rank], "bytes", 3)}` : "";
    const place = `rank ${rank}: pp ${pp}, dp ${dp}, cp ${cp}, tp ${tp}${held}`;
    return el(
      "li",
      { class: "rank", title: place, "aria-label": place },
      el("b", {}, `${rank}`),
      el("small", {}, cellWords(layout, cp, tp)),
    );
  });
  const list = el("ol", { class: "ranks" }, ...cells);
  return el(
    "div",
    { class: "replica" },
    layout.dp > 1 ? el("span", { class: "name" }, `dp ${dp}`) : null,
    list,
  );
}

function cellWords(layout, cp, tp) {
  return [layout.cp > 1 ? `cp ${cp}` : "", layout.tp > 1 ? `tp ${tp}` : ""]
    .filter(Boolean)
    .join(" ");
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
