// The page is built once from the data block. Another run, axis or filter rebuilds a part of it.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const state = { run: 0, axis: "env_steps", filter: "all" };
const color = (k) => `var(--run${k % 6})`;
const page = document.getElementById("page");

const METRICS = [
  ["loss", "Flow-matching loss"], ["policy_loss", "Policy loss"], ["value_loss", "Value loss"], ["approx_kl", "KL to the policy that collected the data"],
  ["explained_variance", "Explained variance of the critic"], ["clip_fraction", "Share of clipped ratios"], ["env_steps_per_second", "Env steps per second"],
];
const POSITION = ["iteration", "env_steps", "minutes", "train_success", "train_episodes"];

function tabs(choices, current, choose, label) {
  const box = node("div", { class: "tabs", role: "group", "aria-label": label });
  for (const [value, text, count] of choices) {
    box.append(node("button", { type: "button", "data-value": value, "aria-pressed": String(value === current), onclick: () => choose(value) },
      text, count === undefined ? null : node("b", {}, count)));
  }
  return box;
}

function themeButton() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const set = (name) => root.setAttribute("data-theme", name);
  set(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => set(dark.matches ? "dark" : "light"));
  const icon = node("svg", { viewBox: "0 0 20 20" }, node("circle", { cx: 10, cy: 10, r: 7.2, fill: "none", stroke: "currentColor", "stroke-width": 1.6 }),
    node("path", { d: "M10 2.8a7.2 7.2 0 0 1 0 14.4z", fill: "currentColor" }));
  return node("button", { class: "icon", type: "button", title: "Light or dark", "aria-label": "Light or dark",
    onclick: () => set(root.getAttribute("data-theme") === "dark" ? "light" : "dark") }, icon);
}

const evaluation = (run, name) => run.evals.find((e) => e.name === name) || null;
const setting = (run, key) => (run.config.find(([k]) => k === key) || [])[1];
const measure = (run) => (run.reports_success ? "Success" : "Mean return");
const last = (list) => (list && list.length ? list[list.length - 1] : undefined);

function duration(minutes) {
  if (minutes === undefined || minutes === null) return "–";
  if (minutes < 1) return `${Math.round(minutes * 60)} s`;
  return minutes < 100 ? `${minutes.toFixed(minutes < 10 ? 1 : 0)} min` : `${(minutes / 60).toFixed(1)} h`;
}

function facts(run) {
  const list = node("dl");
  const add = (label, value) => { if (value !== undefined && value !== null && value !== "") list.append(node("dt", {}, label), node("dd", {}, value)); };
  const hardware = run.meta.hardware || {};
  const steps = last(run.curves.env_steps);
  add("Environment", [setting(run, "env.name"), setting(run, "env.task"), setting(run, "env.id")].filter(Boolean).join(" / "));
  add("Algorithm", setting(run, "algorithm.name"));
  add("Policy", setting(run, "policy.name"));
  add("Training", last(run.curves.minutes) === undefined ? null : `${duration(last(run.curves.minutes))}, ${last(run.curves.iteration)} iterations`);
  add("Env steps", steps ? compact(steps) : null);
  add("Seed", run.meta.seed !== undefined ? run.meta.seed : setting(run, "run.seed"));
  add("Machine", hardware.gpu || (hardware.cpu ? `${hardware.cpu}, ${hardware.cores} cores` : null));
  return list;
}

function hero(run) {
  const before = evaluation(run, run.before), after = evaluation(run, run.after);
  const left = node("div");
  if (!after) {
    left.append(node("p", { class: "muted" }, "This run has not been evaluated yet."));
  } else {
    const limits = span([before, after]);
    const split = setting(run, "run.eval_split"), held = !split || split !== setting(run, "env.split");
    left.append(node("p", { class: "eyebrow" }, before ? `${measure(run)} before and after training` : measure(run)));
    left.append(node("div", { class: "big", id: "headline" }, before && [node("span", { class: "was" }, valueText(before)), node("span", { class: "arrow" }, "→")],
      node("span", { class: "now" }, valueText(after))));
    left.append(node("p", { class: "muted" }, `on ${after.n} ${held ? "held-out " : ""}initial states` + (split && split !== "eval" ? ` (split ${split})` : "") +
      (run.after === "after" ? "" : `, as of iteration ${after.iteration ?? "?"}`)));
    const line = (label, e, tint) => node("div", { class: run.reports_success ? "range" : "range long" }, node("span", {}, label), rangeBar(e, tint, limits), node("span", { class: "num" }, scoreText(e)));
    left.append(node("div", { class: "ranges" }, before && line("before", before, "var(--before)"), line(before ? "after" : "now", after, "var(--after)")));
    if (before) {
      const apart = after.lo > before.hi || after.hi < before.lo;
      const gained = after.value - before.value, sign = gained >= 0 ? "+" : "−";
      const [by, which] = run.reports_success ? [`${Math.abs(100 * gained).toFixed(1)} points`, "95% Wilson"] : [amount(Math.abs(gained)), "95%"];
      const meaning = ` The ${which} intervals ${apart ? "do not overlap" : "overlap: this difference may be chance"}.`;
      left.append(node("p", { class: "muted small", style: { marginTop: "14px" } }, `${sign}${by}.${before.lo === null || after.lo === null ? "" : meaning}`));
    }
  }
  return node("div", { class: "card hero" }, left, node("div", { class: "facts" }, facts(run)));
}

function comparison() {
  if (RUNS.length < 2) return null;
  const limits = [true, false].map((reports) => span(RUNS.filter((run) => run.reports_success === reports)
    .flatMap((run) => [evaluation(run, run.before), evaluation(run, run.after)])));
  const rows = RUNS.map((run, k) => {
    const before = evaluation(run, run.before), after = evaluation(run, run.after);
    return node("tr", {}, node("td", { class: "name" }, node("span", { class: "dot", style: { background: color(k) } }), run.name),
      node("td", { class: "num" }, before ? scoreText(before) : "–"), node("td", { class: "num" }, after ? scoreText(after) : "–"),
      node("td", { class: "wide" }, after ? rangeBar(after, color(k), limits[run.reports_success ? 0 : 1]) : null),
      node("td", { class: "num" }, duration(last(run.curves.minutes))), node("td", { class: "num" }, compact(last(run.curves.env_steps))));
  });
  if (DATA.across) {
    const a = DATA.across, rate = RUNS[0].reports_success;
    rows.push(node("tr", { class: "total" }, node("td", {}, `Interquartile mean of ${a.runs} seeds`), node("td", {}), node("td", { class: "num" },
      scoreText({ n: a.runs, k: rate ? a.runs : undefined, value: a.iqm, lo: a.lo, hi: a.hi })), node("td", {}), node("td", {}), node("td", {})));
  }
  const head = ["Run", "Before", "After", "", "Time", "Env steps"].map((t, k) => node("th", { class: k && k !== 3 ? "num" : "" }, t));
  const table = node("div", { class: "card scroll" }, node("table", { id: "comparison" }, node("thead", {}, node("tr", {}, head)), node("tbody", {}, rows)));
  return node("section", {}, node("div", { class: "head" }, node("h2", {}, "Runs side by side")), table, differences());
}

function differences() {
  const keys = [...new Set(RUNS.flatMap((run) => run.config.map(([k]) => k)))].filter((key) => !/^run\.(name|out)$/.test(key));
  const differ = keys.filter((key) => new Set(RUNS.map((run) => setting(run, key))).size > 1);
  if (!differ.length) return null;
  const head = node("tr", {}, node("th", {}, "Setting"), RUNS.map((run) => node("th", {}, run.name)));
  const rows = differ.map((key) => node("tr", {}, node("td", {}, node("code", {}, key)), RUNS.map((run) => node("td", {}, node("code", {}, setting(run, key) ?? "–")))));
  return node("details", {}, node("summary", {}, differ.length > 1 ? `${differ.length} settings differ` : "1 setting differs"),
    node("div", { class: "card scroll" }, node("table", {}, node("thead", {}, head), node("tbody", {}, rows))));
}

function curves() {
  const box = node("section", { id: "curves" });
  const hasSteps = RUNS.some((run) => last(run.curves.env_steps) > 0);
  const axes = [...(hasSteps ? [["env_steps", "Env steps"]] : []), ["minutes", "Minutes"], ["iteration", "Iterations"]];
  if (!hasSteps && state.axis === "env_steps") state.axis = "minutes";
  const fill = () => {
    const main = node("div", { class: "charts" }), small = node("div", { class: "charts" }), more = node("div", { class: "charts" });
    const along = (run, key) => (run.curves[state.axis] || []).map((x, i) => [x, run.curves[key][i]]);
    const xFormat = state.axis === "minutes" ? (x) => `${compact(x)} min` : (x) => compact(x);
    box.replaceChildren(node("div", { class: "row between head" }, node("h2", {}, "Curves"), tabs(axes, state.axis, (v) => { state.axis = v; fill(); }, "Horizontal axis")),
      main, node("div", { style: { height: "14px" } }), small);
    for (const reports of [true, false]) {
      if (RUNS.some((run) => run.reports_success === reports)) main.append(scores(reports, along, xFormat));
    }
    const known = METRICS.map(([key]) => key);
    if (RUNS.every((run) => !run.reports_success)) known.push("train_return"); // it is already in the chart above
    const others = [...new Set(RUNS.flatMap((run) => Object.keys(run.curves)))].filter((key) => !known.includes(key) && !POSITION.includes(key)).map((key) => [key, key.replaceAll("_", " ")]);
    const addAll = (list, into) => {
      for (const [key, title] of list) {
        const series = RUNS.map((run, k) => (run.curves[key] ? { label: run.name, color: color(k), points: along(run, key) } : null))
          .filter((s) => s && s.points.some((p) => p[0] > 0 && p[1] !== null && p[1] !== undefined)); // imitation takes no env steps, so it has no such curve
        if (!series.length) continue;
        const card = node("div", { class: "card chart", "data-metric": key }, node("h3", { style: { marginBottom: "8px" } }, title));
        into.append(card);
        const share = ["explained_variance", "clip_fraction"].includes(key);
        drawChart(card, series, { title, height: 150, format: share ? percent : compact, xFormat, yRange: key === "explained_variance" ? [-0.2, 1] : null });
      }
    };
    addAll(METRICS, small);
    if (others.length) { box.append(node("details", {}, node("summary", {}, `${others.length} more curves`), more)); addAll(others, more); }
  };
  fill();
  return box;
}

function scores(reports, along, xFormat) {
  const card = node("div", { class: "card chart wide" }), trained = reports ? "train_success" : "train_return";
  const title = reports ? "Success" : "Mean return", series = [], legend = node("div", { class: "legend" });
  const key = (label, tint, faint) => legend.append(node("span", {}, node("i", { class: faint ? "faint" : "", style: { color: tint, opacity: faint ? 0.6 : 1 } }), label));
  RUNS.forEach((run, k) => {
    if (run.reports_success !== reports) return;
    const name = RUNS.length > 1 ? `${run.name}, ` : "";
    const held = run.evals.filter((e) => e.n && e[state.axis] !== null && e[state.axis] !== undefined)
      .map((e) => [e[state.axis], e.value, ...(e.lo === null ? [] : [e.lo, e.hi])]);
    if (run.curves[trained]) series.push({ label: `${name}training`, color: color(k), points: along(run, trained), faint: true, join: true });
    if (held.length) series.push({ label: `${name}held out`, color: color(k), points: held, dots: true });
    if (RUNS.length > 1) key(run.name, color(k));
  });
  if (RUNS.length === 1) key("held-out states, without exploration noise, with 95% intervals", color(0));
  if (series.some((s) => s.faint)) key(RUNS.length > 1 ? "thin: training, with exploration noise" : "training: with exploration noise", RUNS.length > 1 ? "var(--muted)" : color(0), true);
  card.append(node("div", { class: "row between", style: { marginBottom: "10px" } }, node("h3", {}, title), legend));
  if (series.length) drawChart(card, series, { title, height: 300, yRange: reports ? [0, 1] : null, format: reports ? percent : compact, xFormat });
  else card.append(node("p", { class: "empty" }, "Nothing has been measured yet."));
  return card;
}

const FILTERS = [["all", "All", () => true], ["fixed", "Fixed by training", (p) => p.group === "fixed"], ["broken", "Broken by training", (p) => p.group === "broken"],
  ["failures", "Failures", (p) => p.group === "failed" || p.group === "broken"]];
const BY_RETURN = [FILTERS[0], ["better", "Better after training", (p) => p.group === "better"], ["worse", "Not better after training", (p) => p.group === "worse"]];
const MEANING = { fixed: "failed before, solved now", solved: "solved", broken: "solved before, fails now", failed: "fails",
  better: "higher return than before", worse: "no higher return than before", scored: "played" };

function episodes(run) {
  const box = node("section", { id: "episodes" });
  if (!run.episodes.length) return box;
  const paired = run.episodes.some((p) => p.before && p.after);
  const filters = run.reports_success ? FILTERS : BY_RETURN;
  const offered = paired ? filters : run.reports_success ? [FILTERS[0], FILTERS[3]] : [FILTERS[0]];
  if (!offered.some(([name]) => name === state.filter)) state.filter = "all";
  const fill = () => {
    const keep = filters.find(([name]) => name === state.filter)[2];
    const films = run.episodes.filter((p) => (p.before && p.before.video) || (p.after && p.after.video));
    const shown = films.filter(keep);
    const cells = run.episodes.map((p) => {
      const film = films.includes(p), title = `state ${p.init}, ${p.task}: ${run.reports_success ? MEANING[p.group] : returns(p)}`;
      const look = { class: `cell ${p.group}${keep(p) ? "" : " off"}`, title, "aria-label": title, "data-init": p.init };
      return film ? node("button", { ...look, type: "button", onclick: () => jump(p, keep(p) ? null : fill) }) : node("span", look);
    });
    const groups = Object.keys(MEANING).filter((g) => run.episodes.some((p) => p.group === g));
    const keys = node("div", { class: "row keys" }, groups.map((g) => node("span", {}, node("span", { class: `cell ${g}` }), `${MEANING[g]} (${run.episodes.filter((p) => p.group === g).length})`)),
      films.length ? node("span", {}, node("span", { class: "cell film" }), "has a video: click to watch") : null);
    box.replaceChildren(...[
      node("div", { class: "row between head" }, node("h2", {}, "Every episode"),
        tabs(offered.map(([name, text, test]) => [name, text, run.episodes.filter(test).length]), state.filter, (v) => { state.filter = v; fill(); }, "Filter")),
      node("div", { class: "card" }, node("div", { class: "mosaic" }, cells), keys),
      shown.length ? node("div", { class: "films" }, shown.map((p) => film(run, p))) :
        films.length ? node("p", { class: "empty" }, "No episode of this kind has a video.") : null,
      run.videos_left_out ? node("p", { class: "muted small", style: { marginTop: "12px" } }, `The videos of ${run.videos_left_out} more episodes were left out to keep this file small.`) : null].filter(Boolean));
  };
  const jump = (p, refill) => {
    if (refill) { state.filter = "all"; refill(); }
    const card = document.getElementById(`film-${p.init}`);
    card.scrollIntoView({ block: "center" });
    card.classList.add("flash");
    setTimeout(() => card.classList.remove("flash"), 1200);
  };
  fill();
  return box;
}

function toggle(event) {
  const video = event.currentTarget;
  video.dataset.held = video.paused ? "" : "yes";
  if (video.paused) video.play().catch(() => {}); else video.pause();
}

const returns = (p) => `return ${[p.before, p.after].filter(Boolean).map((e) => amount(e.return)).join(" → ")}`;

function film(run, p) {
  const mark = (e) => (run.reports_success ? node("span", { class: `mark ${e.success ? "yes" : "no"}` }, e.success ? `✓ solved in ${e.length}` : "✗ failed") :
    node("span", { class: "mark" }, `return ${amount(e.return)} in ${e.length}`));
  const side = (label, e) => e && node("figure", {}, e.video ?
    node("video", { muted: true, loop: true, playsinline: true, preload: "auto", tabindex: 0, title: "click to pause or play", "data-film": e.video,
      "aria-label": `${label}, state ${p.init}`, onclick: toggle, onkeydown: (k) => { if (k.key === " " || k.key === "Enter") { k.preventDefault(); toggle(k); } } }) :
    node("div", { class: "nofilm" }, "no video"),
    node("figcaption", {}, node("span", {}, label), mark(e)));
  const card = node("article", { class: "card film-card", id: `film-${p.init}`, "data-group": p.group },
    node("header", {}, node("span", { title: p.task }, p.task), node("span", { class: "muted" }, `state ${p.init}`)),
    node("div", { class: "pair" }, side("before", p.before), side(p.before ? "after" : "now", p.after)));
  for (const video of card.querySelectorAll("video")) { video.muted = true; watcher.observe(video); }
  return card;
}

// A video is decoded and played only while it can be seen.
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting && target.dataset.film) { target.src = "data:video/mp4;base64," + target.dataset.film; delete target.dataset.film; }
    if (isIntersecting && !still && !target.dataset.held) target.play().catch(() => {});
    else target.pause();
  }
}, { rootMargin: "200px" });

function tasks(run) {
  if (!run.tasks.length) return null;
  const before = evaluation(run, run.before), after = evaluation(run, run.after);
  const limits = span(run.tasks.flatMap((t) => [t.before, t.after]));
  const row = (name, b, a, total) => node("tr", { class: total ? "total" : "" }, node("td", {}, name), node("td", { class: "num" }, (a || b).n),
    before && [node("td", { class: "num" }, b ? scoreText(b) : "–"), node("td", { class: "wide" }, b && rangeBar(b, "var(--before)", limits))],
    node("td", { class: "num" }, a ? scoreText(a) : "–"), node("td", { class: "wide" }, a && rangeBar(a, "var(--after)", limits)));
  const head = [["Task"], ["Episodes", "num"], ...(before ? [["Before", "num"], [""]] : []), [before ? "After" : measure(run), "num"], [""]];
  return node("section", { id: "tasks" }, node("div", { class: "head" }, node("h2", {}, run.tasks.length > 1 ? "Tasks" : "Task")),
    node("div", { class: "card scroll" }, node("table", {}, node("thead", {}, node("tr", {}, head.map(([t, c]) => node("th", { class: c || "" }, t)))),
      node("tbody", {}, run.tasks.map((t) => row(t.task, t.before, t.after)), run.tasks.length > 1 && after ? row("All", before, after, true) : null))));
}

function config(run) {
  const body = node("tbody"), none = node("p", { class: "empty", hidden: true }, "No setting matches.");
  const rows = run.config.map(([key, value]) => node("tr", {}, node("td", {}, key), node("td", {}, value)));
  body.append(...rows);
  const find = (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const row of rows) { row.hidden = !words.every((w) => row.textContent.toLowerCase().includes(w)); found += !row.hidden; }
    none.hidden = found > 0;
  };
  const about = node("dl"), meta = run.meta, hardware = meta.hardware || {};
  const add = (label, value, code) => { if (value !== undefined && value !== null && value !== "") about.append(node("dt", {}, label), node("dd", {}, code ? node("code", {}, value) : value)); };
  add("Command", meta.command, true);
  add("Commit", meta.commit || meta.git_commit, true);
  add("Started", meta.started);
  add("Finished", meta.finished);
  add("Processor", hardware.cpu && `${hardware.cpu}, ${hardware.cores} cores`);
  add("Memory", hardware.memory_gib && `${hardware.memory_gib} GiB`);
  add("GPU", hardware.gpu || (meta.hardware ? "none" : null));
  for (const [name, version] of Object.entries(meta.versions || {})) add(name, version);
  return node("section", { id: "config" }, node("div", { class: "row between head" }, node("h2", {}, "Settings and machine"),
    node("input", { class: "search", type: "search", placeholder: "Search settings", "aria-label": "Search settings", oninput: find })),
    node("div", { class: "two" }, node("div", { class: "card config" }, node("table", {}, body), none), node("div", { class: "card pad" }, about)));
}

function build() {
  const run = RUNS[state.run];
  const title = RUNS.length > 1 ? `${RUNS.length} runs` : run.name;
  const choose = RUNS.length > 1 ? node("div", { class: "runs" }, tabs(RUNS.map((r, k) => [k, r.name]), state.run, (k) => { state.run = k; build(); }, "Run")) : null;
  const parts = [node("header", { class: "row between" }, node("div", {}, node("p", { class: "eyebrow" }, "embodyrl report"), node("h1", {}, title)), themeToggle),
    choose, hero(run), comparison()];
  page.replaceChildren(...parts.filter(Boolean));
  page.append(curves());
  page.append(...[episodes(run), tasks(run), config(run)].filter(Boolean));
  const what = [RUNS.some((r) => r.reports_success) && ["Success rates", "Wilson score"], RUNS.some((r) => !r.reports_success) && ["Mean returns", "Student's t"]].filter(Boolean);
  page.append(node("footer", {}, what.map(([name, interval]) => `${name} are of the policy without exploration noise, one episode per initial state, with 95% ${interval} intervals. `).join("") +
    "Over several runs: the interquartile mean with a bootstrap interval. ",
    `Written by embodyrl ${DATA.version}; this file works offline and loads nothing else.`));
}

const themeToggle = themeButton();
build();
