// Tasks, settings and machine; and the page, put together from all sections.
function tasks(run) {
  if (!run.tasks.length) return null;
  const before = evaluation(run, run.before),
    after = evaluation(run, run.after);
  const limits = span(run.tasks.flatMap((t) => [t.before, t.after]));
  const row = (name, b, a, total) =>
    node(
      "tr",
      { class: total ? "total" : "" },
      node("td", {}, name),
      node("td", { class: "num" }, (a || b).n),
      before && [
        node("td", { class: "num" }, b ? scoreText(b) : "–"),
        node("td", { class: "wide" }, b && rangeBar(b, "var(--before)", limits)),
      ],
      node("td", { class: "num" }, a ? scoreText(a) : "–"),
      node("td", { class: "wide" }, a && rangeBar(a, "var(--after)", limits)),
    );
  const head = [
    ["Task"],
    ["Episodes", "num"],
    ...(before ? [["Before", "num"], [""]] : []),
    [before ? "After" : measure(run), "num"],
    [""],
  ];
  return node(
    "section",
    { id: "tasks" },
    node("div", { class: "head" }, node("h2", {}, run.tasks.length > 1 ? "Tasks" : "Task")),
    node(
      "div",
      { class: "card scroll" },
      node(
        "table",
        {},
        node(
          "thead",
          {},
          node(
            "tr",
            {},
            head.map(([t, c]) => node("th", { class: c || "" }, t)),
          ),
        ),
        node(
          "tbody",
          {},
          run.tasks.map((t) => row(t.task, t.before, t.after)),
          run.tasks.length > 1 && after ? row("All", before, after, true) : null,
        ),
      ),
    ),
  );
}

function config(run) {
  const body = node("tbody"),
    none = node("p", { class: "empty", hidden: true }, "No setting matches.");
  const rows = run.config.map(([key, value]) =>
    node("tr", {}, node("td", {}, key), node("td", {}, value)),
  );
  body.append(...rows);
  const find = (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const row of rows) {
      row.hidden = !words.every((w) => row.textContent.toLowerCase().includes(w));
      found += !row.hidden;
    }
    none.hidden = found > 0;
  };
  const about = node("dl"),
    meta = run.meta,
    hardware = meta.hardware || {};
  const add = (label, value, code) => {
    if (value !== undefined && value !== null && value !== "")
      about.append(node("dt", {}, label), node("dd", {}, code ? node("code", {}, value) : value));
  };
  add("Command", meta.command, true);
  add("Commit", meta.commit || meta.git_commit, true);
  add("Started", meta.started);
  add("Finished", meta.finished);
  add("Processor", hardware.cpu && `${hardware.cpu}, ${hardware.cores} cores`);
  add("Memory", hardware.memory_gib && `${hardware.memory_gib} GiB`);
  add("GPU", hardware.gpu || (meta.hardware ? "none" : null));
  for (const [name, version] of Object.entries(meta.versions || {})) add(name, version);
  return node(
    "section",
    { id: "config" },
    node(
      "div",
      { class: "row between head" },
      node("h2", {}, "Settings and machine"),
      node("input", {
        class: "search",
        type: "search",
        placeholder: "Search settings",
        "aria-label": "Search settings",
        oninput: find,
      }),
    ),
    node(
      "div",
      { class: "two" },
      node("div", { class: "card config" }, node("table", {}, body), none),
      node("div", { class: "card pad" }, about),
    ),
  );
}

// The page is built once. Another run builds it again; another axis or filter only its section.
function build() {
  const run = RUNS[state.run];
  const title = RUNS.length > 1 ? `${RUNS.length} runs` : run.name;
  const choose =
    RUNS.length > 1
      ? node(
          "div",
          { class: "runs" },
          tabs(
            RUNS.map((r, k) => [k, r.name]),
            state.run,
            (k) => {
              state.run = k;
              build();
            },
            "Run",
          ),
        )
      : null;
  const parts = [
    node(
      "header",
      { class: "row between" },
      node("div", {}, node("p", { class: "eyebrow" }, "embodyrl report"), node("h1", {}, title)),
      themeToggle,
    ),
    choose,
    hero(run),
    comparison(),
  ];
  page.replaceChildren(...parts.filter(Boolean));
  page.append(curves());
  page.append(...[episodes(run), tasks(run), config(run)].filter(Boolean));
  const what = [
    RUNS.some((r) => r.reports_success) && ["Success rates", "Wilson score"],
    RUNS.some((r) => !r.reports_success) && ["Mean returns", "Student's t"],
  ].filter(Boolean);
  page.append(
    node(
      "footer",
      {},
      what
        .map(
          ([name, interval]) =>
            `${name} are of the policy without exploration noise, one episode per initial state, ` +
            `with 95% ${interval} intervals. `,
        )
        .join("") + "Over several runs: the interquartile mean with a bootstrap interval. ",
      `Written by embodyrl ${DATA.version}; this file works offline and loads nothing else.`,
    ),
  );
}

const themeToggle = themeButton();
build();
