// Words and figures: a card for each run, its verdicts, and where configurations differ.

const STATES = {
  done: "finished",
  unfinished: "not finished",
  diverged: "diverged",
  empty: "no steps",
};
const FIGURES = [
  ["Loss", (of) => words(of.loss, "number", 5)],
  ["Best validation", (of) => words(of.val_loss, "number", 5)],
  ["Tokens/s", (of) => words(of.tokens_per_s, "rate")],
  ["Step time", (of) => words(of.step_time_s, "seconds", 3)],
  ["MFU", (of) => words(of.mfu, "share")],
  ["Communication", (of) => words(of.communication_share, "share")],
  ["Bubble", (of) => words(of.bubble, "share")],
  ["Bubble on paper", (of) => words(of.bubble_theory, "share")],
  ["Peak memory", (of) => words(of.memory_bytes, "bytes", 3)],
  ["Memory predicted", (of) => words(of.memory_predicted_bytes, "bytes", 3)],
];

function cardsSection() {
  // A figure that no run has takes no room.
  const none = words(null);
  const used = FIGURES.filter(([, show]) => data.runs.some((run) => show(run.summary) !== none));
  return [el("div", { class: "cards" }, ...data.runs.map((run, index) => card(run, index, used)))];
}

function card(run, index, figures) {
  const of = run.summary;
  const total = of.total_steps === null ? "" : ` of ${whole(of.total_steps)}`;
  const steps = `${whole(of.steps)}${total} steps`;
  const size = of.parameters === null ? [] : [`${words(of.parameters, "rate", 3)} parameters`];
  const rest = [
    steps,
    ...(of.tokens === null ? [] : [`${words(of.tokens, "rate")} ${run.facts?.unit ?? "tokens"}`]),
    ...(of.time_s === null ? [] : [words(of.time_s, "seconds", 3)]),
  ];
  const found = el(
    "article",
    { class: "card", "data-run": index },
    el(
      "header",
      {},
      el("h3", { title: run.name }, run.name),
      el("span", { class: `state ${of.state}` }, STATES[of.state]),
    ),
    el("p", { class: "quiet" }, [of.layout, ...size].filter(Boolean).join(" \u00b7 ") || run.path),
    el("p", { class: "quiet" }, rest.join(" \u00b7 ")),
    el(
      "dl",
      {},
      ...figures.map(([name, show]) =>
        el("div", {}, el("dt", {}, figureName(name, run)), el("dd", {}, show(of))),
      ),
    ),
    pointsNote(run),
    ...run.notes.map((note) => el("p", { class: "note" }, note)),
  );
  found.style.borderTopColor = colorOf(index);
  return found;
}

// Of a long run: what a point of a line stands for.
function pointsNote(run) {
  const each = run.axes[0]?.rows_a_point ?? 1;
  const text = `${each} rows to a point: lines are means, bands go from least to most`;
  return each > 1 ? el("p", { class: "quiet points-note" }, text) : null;
}

// Some families count images.
const figureName = (name, run) =>
  name === "Tokens/s" && run.facts?.unit === "images" ? "Images/s" : name;

// All verdicts that name a step, with their runs.
let allVerdicts = null;
function verdicts() {
  allVerdicts ??= data.runs.flatMap((run, index) =>
    run.verdicts
      .filter((verdict) => Number.isFinite(verdict.step))
      .map((verdict) => ({ run, index, verdict })),
  );
  return allVerdicts;
}

const severityOf = (verdict) => (verdict.severity === "error" ? "error" : "warning");

const titleOf = (verdict) => String(verdict.text ?? verdict.message ?? verdict.kind ?? "verdict");

function verdictsSection() {
  const rows = data.runs.flatMap((run, index) =>
    run.verdicts.map((verdict) => ({ run, index, verdict })),
  );
  if (!rows.length)
    return [
      el(
        "p",
        { class: "panel lead calm" },
        "No verdict: nothing that was watched left its healthy range.",
      ),
    ];
  const urgent = (one) => (severityOf(one.verdict) === "error" ? 0 : 1);
  rows.sort((a, b) => urgent(a) - urgent(b) || (a.verdict.step ?? 0) - (b.verdict.step ?? 0));
  return [el("ul", { class: "verdicts" }, ...rows.map(verdictLine))];
}

function verdictLine({ run, index, verdict }) {
  const severity = severityOf(verdict);
  const hasStep = Number.isFinite(verdict.step);
  const go = hasStep
    ? el(
        "button",
        { type: "button", class: "small", onclick: () => showStep(run, verdict.step) },
        `step ${whole(verdict.step)}`,
      )
    : null;
  const places = [
    ["where", verdict.where],
    ["host", verdict.host],
  ].filter(([, value]) => value);
  return el(
    "li",
    { class: `verdict-line ${severity}` },
    el("span", { class: "badge" }, severity),
    el(
      "div",
      {},
      el("p", { class: "text" }, ...sentence(titleOf(verdict))),
      el(
        "p",
        { class: "quiet" },
        swatch(index),
        ` ${run.name}`,
        ...places.map(([name, value]) => ` \u00b7 ${name} ${value}`),
        rangeWords(verdict),
      ),
    ),
    go,
  );
}

// What happened stands out from its cause and what to do about it.
function sentence(text) {
  const end = text.indexOf("; ");
  return end < 0 ? [text] : [el("b", {}, text.slice(0, end)), text.slice(end)];
}

function rangeWords({ value, low, high }) {
  if (!Number.isFinite(value)) return "";
  const bounds = [
    Number.isFinite(low) ? `at least ${digitsOf(low)}` : "",
    Number.isFinite(high) ? `at most ${digitsOf(high)}` : "",
  ]
    .filter(Boolean)
    .join(", ");
  return ` \u00b7 ${digitsOf(value)}${bounds ? ` (healthy: ${bounds})` : ""}`;
}

// Zooms all charts to the steps around one, and goes to the first of them.
function showStep(run, step) {
  const x = placeOf(run, step);
  const [first, last] = fullView();
  if (x === null) return;
  setView(x - (last - first) * 0.06, x + (last - first) * 0.06);
  setCursor(x);
  document.querySelector(".chart")?.scrollIntoView({ block: "center" });
}

// One row a key, one column a run; keys whose values differ are marked.
function configSection() {
  const runs = data.runs
    .map((run, index) => ({ run, index, flat: flatten(run.config) }))
    .filter(({ flat }) => flat.size);
  if (!runs.length)
    return [el("p", { class: "panel lead" }, "No run has a config.yaml that can be read.")];
  const keys = [...new Set(runs.flatMap(({ flat }) => [...flat.keys()]))];
  const differs = (key) => new Set(runs.map(({ flat }) => flat.get(key) ?? "")).size > 1;
  const count = keys.filter(differs).length;
  const table = el(
    "table",
    { class: "figures config" },
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        el("th", { scope: "col" }, "key"),
        ...runs.map(({ run, index }) => el("th", { scope: "col" }, swatch(index), ` ${run.name}`)),
      ),
    ),
    el("tbody", {}, ...keys.map((key) => configRow(key, runs, differs(key)))),
  );
  const only = el("input", {
    type: "checkbox",
    id: "only-different",
    checked: count > 0,
    onchange: () => table.classList.toggle("only", only.checked),
  });
  table.classList.toggle("only", count > 0);
  return [
    el(
      "article",
      { class: "panel" },
      runs.length > 1
        ? el(
            "p",
            { class: "lead" },
            el("label", {}, only, ` only what differs (${plural(count, "key")} of ${keys.length})`),
          )
        : null,
      scrolling(table),
    ),
  ];
}

function configRow(key, runs, isDifferent) {
  return el(
    "tr",
    { class: isDifferent ? "differs" : null },
    el("th", { scope: "row" }, key),
    ...runs.map(({ flat }) => el("td", {}, flat.get(key) ?? "\u2013")),
  );
}

// {"train": {"lr": 1}} as "train.lr" -> "1".
function flatten(value, prefix = "", found = new Map()) {
  for (const [name, one] of Object.entries(value ?? {})) {
    const key = prefix ? `${prefix}.${name}` : name;
    if (one !== null && typeof one === "object" && !Array.isArray(one)) flatten(one, key, found);
    else
      found.set(
        key,
        one === null ? "null" : Array.isArray(one) ? JSON.stringify(one) : String(one),
      );
  }
  return found;
}
