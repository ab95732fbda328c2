// Tasks, settings and machine; and the page, put together from all sections.
const ORDERS = {
  listed: ["As listed", () => 0],
  lowest: ["Lowest first", (x, y) => worth(x) - worth(y)],
  change: ["Largest change", (x, y) => Math.abs(change(y)) - Math.abs(change(x))],
};
const worth = (t) => (t.after || t.training || t.before).value ?? -Infinity;
const change = (t) => (t.before && t.after ? t.after.value - t.before.value : 0);

// A name such as libero_object/pick_up_the_milk: the suite, and the task in words.
function taskName(name) {
  const cut = name.lastIndexOf("/") + 1;
  return node(
    "td",
    { class: "task", title: name },
    cut > 0 && node("span", { class: "muted small" }, name.slice(0, cut - 1)),
    node("span", {}, name.slice(cut).replaceAll("_", " ")),
  );
}

// Success in equal parts of the training as small columns; a gap where no episode was scored.
function slices(score) {
  const n = score.slices.length;
  return node(
    "svg",
    { class: "slices", role: "img", "aria-label": "success over the training", viewBox: `0 0 ${n * 5} 24`, preserveAspectRatio: "none" },
    score.slices.map((rate, i) =>
      rate === null
        ? null
        : node("rect", {
            x: i * 5,
            y: 23 - 22 * rate,
            width: 4,
            height: 1 + 22 * rate,
            style: { fill: "var(--after)", opacity: 0.75 },
          }),
    ),
  );
}

function tasks(run) {
  if (!run.tasks.length) return null;
  const before = evaluation(run, run.before),
    after = evaluation(run, run.after),
    trained = run.tasks.some((t) => t.training);
  const limits = span(run.tasks.flatMap((t) => [t.before, t.after]));
  const row = (name, { before: b, after: a, training: t }, total) =>
    node(
      "tr",
      { class: total ? "total" : "" },
      total ? node("td", {}, name) : taskName(name),
      node("td", { class: "num" }, (a || b || { n: "–" }).n),
      before && [
        node("td", { class: "num" }, b ? scoreText(b) : "–"),
        node("td", { class: "wide" }, b && rangeBar(b, "var(--before)", limits)),
      ],
      after && [
        node("td", { class: "num" }, a ? scoreText(a) : "–"),
        node("td", { class: "wide" }, a && rangeBar(a, "var(--after)", limits)),
      ],
      trained && [
        node(
          "td",
          { class: "num", title: t ? `the newest ${t.n} of ${t.all} training episodes` : null },
          t ? [scoreText(t), node("span", { class: "muted" }, ` of ${t.n}`)] : total ? "" : "–",
        ),
        node("td", { class: "slim" }, t && slices(t)),
      ],
    );
  const head = [
    ["Task"],
    ["Episodes", "num"],
    ...(before ? [["Before", "num"], [""]] : []),
    ...(after ? [[before ? "After" : measure(run), "num"], [""]] : []),
    ...(trained ? [["In training", "num"], [""]] : []),
  ];
  const body = node("tbody");
  const fill = (order) => {
    body.replaceChildren(
      ...[...run.tasks].sort(ORDERS[order][1]).map((t) => row(t.task, t)),
      ...(run.tasks.length > 1 && after ? [row("All", { before, after }, true)] : []),
    );
    if (bar.firstChild) bar.replaceChildren(chooser(order));
  };
  const orders = Object.keys(ORDERS).filter((key) => key !== "change" || before);
  const chooser = (order) =>
    tabs(orders.map((key) => [key, ORDERS[key][0]]), order, fill, "Order of the tasks");
  // A few tasks are seen at a glance.
  const bar = node("div", {}, run.tasks.length > 5 ? chooser("listed") : null);
  fill("listed");
  return node(
    "section",
    { id: "tasks" },
    node(
      "div",
      { class: "row between head" },
      node("h2", {}, run.tasks.length > 1 ? `${run.tasks.length} tasks` : "Task"),
      bar,
    ),
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
        body,
      ),
    ),
    trained &&
      node(
        "p",
        { class: "muted small" },
        "In training: with exploration noise, over the newest iterations that have 50 episodes of " +
          "the task together. The columns beside it are equal parts of the training.",
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
  add("Verdict", meta.verdict);
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
