// The data, what all sections share, and the summary: scores, facts and runs side by side.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const state = { run: 0, axis: "env_steps", filter: "all" };
const color = (k) => `var(--run${k % 6})`;
const page = document.getElementById("page");

const METRICS = [
  ["loss", "Flow-matching loss"],
  ["policy_loss", "Policy loss"],
  ["value_loss", "Value loss"],
  ["approx_kl", "KL to the policy that collected the data"],
  ["explained_variance", "Explained variance of the critic"],
  ["clip_fraction", "Share of clipped ratios"],
  ["env_steps_per_second", "Env steps per second"],
];
const POSITION = ["iteration", "env_steps", "minutes", "train_success", "train_episodes"];

function tabs(choices, current, choose, label) {
  const box = node("div", { class: "tabs", role: "group", "aria-label": label });
  for (const [value, text, count] of choices) {
    box.append(
      node(
        "button",
        {
          type: "button",
          "data-value": value,
          "aria-pressed": String(value === current),
          onclick: () => choose(value),
        },
        text,
        count === undefined ? null : node("b", {}, count),
      ),
    );
  }
  return box;
}

function themeButton() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const set = (name) => root.setAttribute("data-theme", name);
  set(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => set(dark.matches ? "dark" : "light"));
  const icon = node(
    "svg",
    { viewBox: "0 0 20 20" },
    node("circle", {
      cx: 10,
      cy: 10,
      r: 7.2,
      fill: "none",
      stroke: "currentColor",
      "stroke-width": 1.6,
    }),
    node("path", { d: "M10 2.8a7.2 7.2 0 0 1 0 14.4z", fill: "currentColor" }),
  );
  return node(
    "button",
    {
      class: "icon",
      type: "button",
      title: "Light or dark",
      "aria-label": "Light or dark",
      onclick: () => set(root.getAttribute("data-theme") === "dark" ? "light" : "dark"),
    },
    icon,
  );
}

const evaluation = (run, name) => run.evals.find((e) => e.name === name) || null;
const setting = (run, key) => (run.config.find(([k]) => k === key) || [])[1];
const measure = (run) => (run.reports_success ? "Success" : "Mean return");
const last = (list) => (list && list.length ? list[list.length - 1] : undefined);

function duration(minutes) {
  if (minutes === undefined || minutes === null) return "–";
  if (minutes < 1) return `${Math.round(minutes * 60)} s`;
  return minutes < 100
    ? `${minutes.toFixed(minutes < 10 ? 1 : 0)} min`
    : `${(minutes / 60).toFixed(1)} h`;
}

function facts(run) {
  const list = node("dl");
  const add = (label, value) => {
    if (value !== undefined && value !== null && value !== "")
      list.append(node("dt", {}, label), node("dd", {}, value));
  };
  const hardware = run.meta.hardware || {};
  const steps = last(run.curves.env_steps);
  add(
    "Environment",
    ["env.name", "env.suite", "env.task", "env.id"]
      .map((key) => setting(run, key))
      .filter(Boolean)
      .join(" / "),
  );
  add("Algorithm", setting(run, "algorithm.name"));
  add("Policy", setting(run, "policy.name"));
  const scored = last(run.evals);
  add(
    "Executed",
    scored && scored.execute ? `${scored.execute} of ${scored.horizon} actions` : null,
  );
  add(
    "Training",
    last(run.curves.minutes) === undefined
      ? null
      : `${duration(last(run.curves.minutes))}, ${last(run.curves.iteration)} iterations`,
  );
  add("Env steps", steps ? compact(steps) : null);
  add("Seed", run.meta.seed !== undefined ? run.meta.seed : setting(run, "run.seed"));
  add(
    "Machine",
    hardware.gpu || (hardware.cpu ? `${hardware.cpu}, ${hardware.cores} cores` : null),
  );
  return list;
}

function hero(run) {
  const before = evaluation(run, run.before),
    after = evaluation(run, run.after);
  const left = node("div");
  if (!after) {
    left.append(node("p", { class: "muted" }, "This run has not been evaluated yet."));
  } else {
    const limits = span([before, after]);
    const split = setting(run, "run.eval_split"),
      held = !split || split !== setting(run, "env.split");
    left.append(
      node(
        "p",
        { class: "eyebrow" },
        before ? `${measure(run)} before and after training` : measure(run),
      ),
    );
    left.append(
      node(
        "div",
        { class: "big", id: "headline" },
        before && [
          node("span", { class: "was" }, valueText(before)),
          node("span", { class: "arrow" }, "→"),
        ],
        node("span", { class: "now" }, valueText(after)),
      ),
    );
    left.append(
      node(
        "p",
        { class: "muted" },
        `on ${after.n} ${held ? "held-out " : ""}initial states` +
          (split && split !== "eval" ? ` (split ${split})` : "") +
          (run.after === "after" ? "" : `, as of iteration ${after.iteration ?? "?"}`),
      ),
    );
    const notes = scoreNotes(after);
    if (notes) left.append(node("p", { class: "muted", id: "notes" }, notes));
    const line = (label, e, tint) =>
      node(
        "div",
        { class: run.reports_success ? "range" : "range long" },
        node("span", {}, label),
        rangeBar(e, tint, limits),
        node("span", { class: "num" }, scoreText(e)),
      );
    left.append(
      node(
        "div",
        { class: "ranges" },
        before && line("before", before, "var(--before)"),
        line(before ? "after" : "now", after, "var(--after)"),
      ),
    );
    if (before) {
      const apart = after.lo > before.hi || after.hi < before.lo;
      const gained = after.value - before.value,
        sign = gained >= 0 ? "+" : "−";
      const [by, which] = run.reports_success
        ? [`${Math.abs(100 * gained).toFixed(1)} points`, "95% Wilson"]
        : [amount(Math.abs(gained)), "95%"];
      const verdict = apart ? "do not overlap" : "overlap: this difference may be chance";
      const meaning = ` The ${which} intervals ${verdict}.`;
      left.append(
        node(
          "p",
          { class: "muted small", style: { marginTop: "14px" } },
          `${sign}${by}.${before.lo === null || after.lo === null ? "" : meaning}`,
        ),
      );
    }
  }
  return node("div", { class: "card hero" }, left, node("div", { class: "facts" }, facts(run)));
}

// What a score does not say by itself: success at any time, and episodes that it leaves out.
function scoreNotes(score) {
  const said = [];
  if (score.once)
    said.push(`Solved at the end of the episode: ${scoreText(score)}; at any time: ${scoreText(score.once)}.`);
  if (score.not_counted) {
    const all = score.n + score.not_counted;
    said.push(`A person acted in ${score.not_counted} of ${all} episodes, which are not counted.`);
  }
  if (score.faults) said.push(`${score.faults} more ended by a fault and were played again.`);
  return said.join(" ");
}

function comparison() {
  if (RUNS.length < 2) return null;
  const limits = [true, false].map((reports) =>
    span(
      RUNS.filter((run) => run.reports_success === reports).flatMap((run) => [
        evaluation(run, run.before),
        evaluation(run, run.after),
      ]),
    ),
  );
  const rows = RUNS.map((run, k) => {
    const before = evaluation(run, run.before),
      after = evaluation(run, run.after);
    return node(
      "tr",
      {},
      node(
        "td",
        { class: "name" },
        node("span", { class: "dot", style: { background: color(k) } }),
        run.name,
      ),
      node("td", { class: "num" }, before ? scoreText(before) : "–"),
      node("td", { class: "num" }, after ? scoreText(after) : "–"),
      node(
        "td",
        { class: "wide" },
        after ? rangeBar(after, color(k), limits[run.reports_success ? 0 : 1]) : null,
      ),
      node("td", { class: "num" }, duration(last(run.curves.minutes))),
      node("td", { class: "num" }, compact(last(run.curves.env_steps))),
    );
  });
  if (DATA.across) {
    const a = DATA.across,
      rate = RUNS[0].reports_success;
    rows.push(
      node(
        "tr",
        { class: "total" },
        node("td", {}, `Interquartile mean of ${a.runs} seeds at iteration ${a.iteration}`),
        node("td", {}),
        node(
          "td",
          { class: "num" },
          scoreText({ n: a.runs, k: rate ? a.runs : undefined, value: a.iqm, lo: a.lo, hi: a.hi }),
        ),
        node("td", {}),
        node("td", {}),
        node("td", {}),
      ),
    );
  }
  const head = ["Run", "Before", "After", "", "Time", "Env steps"].map((t, k) =>
    node("th", { class: k && k !== 3 ? "num" : "" }, t),
  );
  const table = node(
    "div",
    { class: "card scroll" },
    node(
      "table",
      { id: "comparison" },
      node("thead", {}, node("tr", {}, head)),
      node("tbody", {}, rows),
    ),
  );
  return node(
    "section",
    {},
    node("div", { class: "head" }, node("h2", {}, "Runs side by side")),
    table,
    differences(),
  );
}

function differences() {
  const keys = [...new Set(RUNS.flatMap((run) => run.config.map(([k]) => k)))].filter(
    (key) => !/^run\.(name|out)$/.test(key),
  );
  const differ = keys.filter((key) => new Set(RUNS.map((run) => setting(run, key))).size > 1);
  if (!differ.length) return null;
  const head = node(
    "tr",
    {},
    node("th", {}, "Setting"),
    RUNS.map((run) => node("th", {}, run.name)),
  );
  const rows = differ.map((key) =>
    node(
      "tr",
      {},
      node("td", {}, node("code", {}, key)),
      RUNS.map((run) => node("td", {}, node("code", {}, setting(run, key) ?? "–"))),
    ),
  );
  return node(
    "details",
    {},
    node(
      "summary",
      {},
      differ.length > 1 ? `${differ.length} settings differ` : "1 setting differs",
    ),
    node(
      "div",
      { class: "card scroll" },
      node("table", {}, node("thead", {}, head), node("tbody", {}, rows)),
    ),
  );
}
