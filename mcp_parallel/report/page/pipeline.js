// What each pipeline rank does when, in one step: from the plan, on paper.

const WORK = [
  { name: "forward", letter: "F" },
  { name: "backward", letter: "B" },
  { name: "input gradient", letter: "I" },
  { name: "weight gradient", letter: "W" },
];
const ROW = 30;
const CELL = 22; // least pixels of the shortest work that still shows its number
const timelines = [];

function pipelineSection() {
  return distinct((run) => run.facts?.pipeline && JSON.stringify(run.facts.pipeline)).map(
    ({ runs, indices }) => {
      const plan = runs[0].facts.pipeline;
      const used = WORK.filter((_, kind) =>
        plan.ranks.some((row) => row.some(([k]) => k === kind)),
      );
      const part =
        plan.shown < plan.microbatches && plan.shown ? ` (the first ${plan.shown} are drawn)` : "";
      return el(
        "article",
        { class: "panel" },
        runLabels(indices),
        el(
          "p",
          { class: "lead" },
          `${plan.schedule}: ${plan.pp} ranks` +
            (plan.chunks > 1 ? ` of ${plan.chunks} stages` : "") +
            `, ${plan.microbatches} micro-batches` +
            `${part}; forward, input gradient and weight gradient take one unit each.`,
        ),
        plan.ranks.length ? timeline(plan) : null,
        el(
          "ul",
          { class: "legend" },
          ...used.map((work) =>
            el("li", {}, dot(workColor(WORK.indexOf(work))), `${work.letter} ${work.name}`),
          ),
          plan.chunks > 1 ? el("li", {}, "fainter: later stages of a rank") : null,
          el("li", {}, dot("var(--idle)"), "idle"),
        ),
        bubbleTable(plan, indices),
      );
    },
  );
}

const workColor = (kind) => `var(--work-${kind})`;

function timeline(plan) {
  const inner = el("div", {
    class: "timeline",
    tabindex: 0,
    role: "img",
    "aria-label": `Timeline of ${plan.schedule} on ${plan.pp} ranks`,
  });
  const told = el(
    "p",
    { class: "quiet told-work" },
    "Point at a box to read it; a long step scrolls.",
  );
  timelines.push(() => drawTimeline(plan, inner, told));
  return el("div", {}, inner, told);
}

function drawTimeline(plan, inner, told) {
  const shortest = Math.min(
    ...plan.ranks.flatMap((row) => row.map((one) => one[4] - one[3])).filter((time) => time > 0),
  );
  const least = Math.min((CELL * plan.makespan) / shortest, 12000);
  const width = Math.max(inner.clientWidth, least + 46);
  const x = linearScale(0, plan.makespan, 40, width - 6);
  const rows = plan.ranks.map((row, rank) => {
    const top = rank * ROW + 4;
    return svg(
      "g",
      {},
      svg("text", { class: "who", x: 0, y: top + 17 }, `pp ${rank}`),
      svg("rect", { class: "idle", x: 40, y: top, width: width - 46, height: ROW - 6, rx: 2 }),
      ...row.map((one) => box(one, x, top)),
    );
  });
  const height = plan.ranks.length * ROW + 6;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, ...rows);
  picture.addEventListener("pointermove", (event) => {
    const place = picture.getBoundingClientRect();
    const rank = Math.floor((event.clientY - place.top - 2) / ROW);
    const time = x.invert(((event.clientX - place.left) * width) / place.width);
    told.textContent = workWords(plan, rank, time);
  });
  inner.replaceChildren(picture);
}

function box([kind, chunk, microbatch, start, end], x, top) {
  const width = Math.max(0.5, x(end) - x(start) - 1);
  return svg(
    "g",
    { class: "cell" },
    svg("rect", {
      x: x(start),
      y: top,
      width,
      height: ROW - 6,
      rx: 2,
      fill: workColor(kind),
      "fill-opacity": chunk % 2 ? 0.55 : 1,
    }),
    width < 15
      ? null
      : svg(
          "text",
          {
            class: chunk % 2 ? "pale" : "",
            x: x(start) + width / 2,
            y: top + 16,
            "text-anchor": "middle",
          },
          `${microbatch}`,
        ),
  );
}

function workWords(plan, rank, time) {
  const row = plan.ranks[rank];
  if (!row || time < 0) return "";
  const found = row.find(([, , , start, end]) => start <= time && time < end);
  if (!found) return `rank ${rank}: idle`;
  const [kind, chunk, microbatch] = found;
  const stage = plan.chunks > 1 ? ` of its stage ${chunk + 1}` : "";
  return (
    `pipeline rank ${rank}: ${WORK[kind].name} of micro-batch ${microbatch}${stage}, ` +
    `${digitsOf(found[3])} to ${digitsOf(found[4])}`
  );
}

// Idle part of each rank: on paper, and measured in each run.
function bubbleTable(plan, indices) {
  const measured = indices.filter((index) => data.runs[index].bubble_by_rank.length);
  const ranks = [...plan.bubble.keys()];
  const row = (title, values) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, ...title),
      el("td", {}, words(mean(values), "share")),
      ...ranks.map((rank) => el("td", {}, words(values[rank], "share"))),
    );
  const head = ["idle", "mean", ...ranks.map((rank) => `pp ${rank}`)];
  return scrolling(
    el(
      "table",
      { class: "figures" },
      el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
      el(
        "tbody",
        {},
        row(["on paper"], plan.bubble),
        ...measured.map((index) =>
          row([swatch(index), " measured"], data.runs[index].bubble_by_rank),
        ),
      ),
    ),
  );
}

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, one) => sum + one, 0) / known.length : null;
}

const scrolling = (table) => el("div", { class: "scroll", tabindex: 0, role: "group" }, table);
