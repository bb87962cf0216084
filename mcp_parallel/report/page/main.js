// The page, put together.

const SECTIONS = [
  ["Overview", cardsSection],
  ["Verdicts", verdictsSection],
  ...data.groups.map((group) => [
    group,
    () => [...chartsOf(group), ...(group === "Memory" ? memorySection() : [])],
  ]),
  ["Pipeline", pipelineSection],
  ["Layout", layoutSection],
  ["Configuration", configSection],
];

function chartsOf(group) {
  const fields = Object.entries(data.fields).filter(([, shown]) => shown.group === group);
  const isColumn = (name) => data.runs.some((run) => run.columns[name]);
  const hasHome = (name) => data.fields[name].over && isColumn(data.fields[name].over);
  const figures = [];
  for (const [name] of fields) {
    if (isColumn(name) && !hasHome(name)) {
      const over = fields
        .map(([other]) => other)
        .filter((other) => data.fields[other].over === name && isColumn(other));
      figures.push(new Chart([name, ...over]).figure);
    }
    if (data.runs.some((run) => run.lists[name])) figures.push(new ListChart(name).figure);
  }
  return figures.length ? [el("div", { class: "charts" }, ...figures)] : [];
}

function build() {
  const main = document.getElementById("main");
  const nav = document.getElementById("nav");
  main.replaceChildren();
  for (const [title, make] of SECTIONS) {
    const parts = make();
    if (!parts.length) continue;
    const id = title.toLowerCase().replaceAll(" ", "-");
    main.append(
      el(
        "section",
        { id, "aria-labelledby": `${id}-title` },
        el("h2", { id: `${id}-title` }, title),
        ...parts,
      ),
    );
    nav.append(el("a", { href: `#${id}` }, title));
  }
  const made = new Date(data.made_s * 1000).toLocaleString();
  document.getElementById("made").textContent = `${plural(data.runs.length, "run")} \u00b7 ${made}`;
}

// A chip for each run: press to hide or show, press twice (or with shift) to see it alone.
function buildChips() {
  const chips = data.runs.map((run, index) => {
    const chip = el(
      "button",
      {
        type: "button",
        class: "chip",
        title: `${run.name}\n${run.path}\nshift: this run alone`,
        onclick: (event) => (event.shiftKey ? onlyRun(index) : toggleRun(index)),
      },
      swatch(index),
      el("span", { class: "chip-name" }, run.name),
    );
    const update = () => chip.setAttribute("aria-pressed", isShown(index));
    update();
    onChange(update);
    return chip;
  });
  document.getElementById("runs").replaceChildren(...chips);
}

function buildControls() {
  const axes = Object.entries(AXES)
    .filter(([name]) => hasAxis(name))
    .map(([name, { title }]) => {
      const button = el("button", { type: "button", onclick: () => change({ axis: name }) }, title);
      const update = () => button.setAttribute("aria-pressed", state.axis === name);
      update();
      onChange(update);
      return button;
    });
  const smooth = el("input", {
    type: "range",
    id: "smoothing",
    min: 0,
    max: 99,
    value: 0,
    "aria-label": "Smoothing",
    oninput: () => change({ smoothing: Number(smooth.value) / 100 }),
  });
  const shown = el("output", { for: "smoothing" }, "0");
  const all = el(
    "button",
    { type: "button", id: "reset", onclick: () => change({ view: null }) },
    "all",
  );
  const log = el(
    "button",
    {
      type: "button",
      id: "log",
      "aria-pressed": "false",
      onclick: () => {
        const isLog = log.getAttribute("aria-pressed") !== "true";
        log.setAttribute("aria-pressed", isLog);
        for (const chart of [...charts, ...lists]) chart.setLog(isLog || chart.shown.log);
      },
    },
    "log y",
  );
  onChange(() => {
    shown.textContent = state.smoothing.toFixed(2).replace(/\.?0+$/, "");
    all.disabled = state.view === null;
  });
  all.disabled = true;
  document
    .getElementById("controls")
    .replaceChildren(
      el("span", { class: "group", role: "group", "aria-label": "x axis" }, ...axes),
      el("label", { class: "slider" }, "smooth ", smooth, shown),
      el(
        "span",
        { class: "group", role: "group", "aria-label": "Zoom" },
        el(
          "button",
          { type: "button", id: "closer", "aria-label": "Zoom in", onclick: () => zoom(0.6) },
          "+",
        ),
        el(
          "button",
          { type: "button", id: "wider", "aria-label": "Zoom out", onclick: () => zoom(1 / 0.6) },
          "\u2212",
        ),
        all,
      ),
      el("span", { class: "group" }, log),
    );
}

// Follows the system until the reader chooses; print is always light.
function buildTheme() {
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () =>
    (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const update = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use the ${isDark() ? "light" : "dark"} theme`);
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    update();
  });
  system.addEventListener("change", update);
  update();
}

function drawTimelines() {
  for (const draw of timelines) draw();
}

buildTheme();
build();
buildChips();
buildControls();
drawTimelines();
onChange(() => {
  for (const one of [...charts, ...lists]) one.refresh();
  for (const found of document.querySelectorAll(".card"))
    found.classList.toggle("off", !isShown(Number(found.dataset.run)));
});
window.addEventListener("resize", drawTimelines);
window.addEventListener("beforeprint", () => {
  for (const one of [...charts, ...lists]) one.draw();
});
