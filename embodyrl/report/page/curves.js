// The curves of training, along env steps, minutes or iterations.
function curves() {
  const box = node("section", { id: "curves" });
  const hasSteps = RUNS.some((run) => last(run.curves.env_steps) > 0);
  const axes = [
    ...(hasSteps ? [["env_steps", "Env steps"]] : []),
    ["minutes", "Minutes"],
    ["iteration", "Iterations"],
  ];
  if (!hasSteps && state.axis === "env_steps") state.axis = "minutes";
  const fill = () => {
    const main = node("div", { class: "charts" }),
      small = node("div", { class: "charts" }),
      more = node("div", { class: "charts" });
    const along = (run, key) =>
      (run.curves[state.axis] || []).map((x, i) => [x, run.curves[key][i]]);
    const xFormat = state.axis === "minutes" ? (x) => `${compact(x)} min` : (x) => compact(x);
    box.replaceChildren(
      node(
        "div",
        { class: "row between head" },
        node("h2", {}, "Curves"),
        tabs(
          axes,
          state.axis,
          (v) => {
            state.axis = v;
            fill();
          },
          "Horizontal axis",
        ),
      ),
      main,
      node("div", { style: { height: "14px" } }),
      small,
    );
    for (const reports of [true, false]) {
      if (RUNS.some((run) => run.reports_success === reports))
        main.append(scores(reports, along, xFormat));
    }
    const known = METRICS.map(([key]) => key);
    // The mean return is already in the chart above, if no run reports success.
    if (RUNS.every((run) => !run.reports_success)) known.push("train_return");
    const others = [...new Set(RUNS.flatMap((run) => Object.keys(run.curves)))]
      .filter((key) => !known.includes(key) && !POSITION.includes(key))
      .map((key) => [key, key.replaceAll("_", " ")]);
    const addAll = (list, into) => {
      for (const [key, title] of list) {
        // Imitation takes no env steps: its points would all be at 0.
        const series = RUNS.map((run, k) =>
          run.curves[key] ? { label: run.name, color: color(k), points: along(run, key) } : null,
        ).filter((s) => s && s.points.some((p) => p[0] > 0 && p[1] !== null && p[1] !== undefined));
        if (!series.length) continue;
        const card = node(
          "div",
          { class: "card chart", "data-metric": key },
          node("h3", { style: { marginBottom: "8px" } }, title),
        );
        into.append(card);
        const share = ["explained_variance", "clip_fraction"].includes(key);
        drawChart(card, series, {
          title,
          height: 150,
          format: share ? percent : compact,
          xFormat,
          yRange: key === "explained_variance" ? [-0.2, 1] : null,
        });
      }
    };
    addAll(METRICS, small);
    if (others.length) {
      box.append(node("details", {}, node("summary", {}, `${others.length} more curves`), more));
      addAll(others, more);
    }
  };
  fill();
  return box;
}

function scores(reports, along, xFormat) {
  const card = node("div", { class: "card chart wide" }),
    trained = reports ? "train_success" : "train_return";
  const title = reports ? "Success" : "Mean return",
    series = [],
    legend = node("div", { class: "legend" });
  const key = (label, tint, faint) =>
    legend.append(
      node(
        "span",
        {},
        node("i", {
          class: faint ? "faint" : "",
          style: { color: tint, opacity: faint ? 0.6 : 1 },
        }),
        label,
      ),
    );
  RUNS.forEach((run, k) => {
    if (run.reports_success !== reports) return;
    const name = RUNS.length > 1 ? `${run.name}, ` : "";
    const held = run.evals
      .filter((e) => e.n && e[state.axis] !== null && e[state.axis] !== undefined)
      .map((e) => [e[state.axis], e.value, ...(e.lo === null ? [] : [e.lo, e.hi])]);
    if (run.curves[trained])
      series.push({
        label: `${name}training`,
        color: color(k),
        points: along(run, trained),
        faint: true,
        join: true,
      });
    if (held.length)
      series.push({ label: `${name}held out`, color: color(k), points: held, dots: true });
    if (RUNS.length > 1) key(run.name, color(k));
  });
  const fits = reports ? DATA.fits.filter((fit) => fit[state.axis]) : [];
  for (const fit of fits) {
    const found = fit[state.axis];
    if (found.refused) continue;
    const tint = fit.runs.length > 1 ? "var(--muted)" : color(fit.runs[0]);
    series.push({ label: "fitted curve", color: tint, points: found.curve, dashed: true });
  }
  if (RUNS.length === 1)
    key("held-out states, without exploration noise, with 95% intervals", color(0));
  if (series.some((s) => s.faint))
    key(
      RUNS.length > 1
        ? "thin: training, with exploration noise"
        : "training: with exploration noise",
      RUNS.length > 1 ? "var(--muted)" : color(0),
      true,
    );
  card.append(
    node(
      "div",
      { class: "row between", style: { marginBottom: "10px" } },
      node("h3", {}, title),
      legend,
    ),
  );
  if (series.length)
    drawChart(card, series, {
      title,
      height: 300,
      yRange: reports ? [0, 1] : null,
      format: reports ? percent : compact,
      xFormat,
    });
  else card.append(node("p", { class: "empty" }, "Nothing has been measured yet."));
  if (fits.length) card.append(fitted(fits, xFormat));
  return card;
}

// What the fitted curves say of more compute, as a table.
function fitted(fits, xFormat) {
  const bounds = ([value, low, high]) =>
    `${percent(value)} [${(100 * low).toFixed(0)}, ${(100 * high).toFixed(0)}]`;
  const row = (fit) => {
    const found = fit[state.axis];
    const name = fit.runs.length > 1 ? `${fit.runs.length} seeds together` : RUNS[fit.runs[0]].name;
    if (found.refused)
      return node("tr", {}, node("td", {}, name), node("td", { colspan: 5 }, `no curve: ${found.refused}`));
    const cells = [
      xFormat(found.last),
      bounds(found.ahead["2"]),
      bounds(found.ahead["4"]),
      bounds(found.asymptote),
      xFormat(found.middle[0]),
    ];
    return node("tr", {}, node("td", {}, name), cells.map((text) => node("td", { class: "num" }, text)));
  };
  const head = ["Fitted curve", "So far", "At twice that", "At four times", "At the end", "Half of the rise"];
  return node(
    "div",
    { class: "scroll", id: "fits" },
    node(
      "table",
      {},
      node("thead", {}, node("tr", {}, head.map((t, k) => node("th", { class: k ? "num" : "" }, t)))),
      node("tbody", {}, fits.map(row)),
    ),
    node(
      "p",
      { class: "muted small" },
      "Dashed: R_0 + (A - R_0) / (1 + (C_mid / C)^B), with 95% bootstrap intervals of the curve. " +
        "It supposes that nothing but compute changes; a learning rate that falls to its end does.",
    ),
  );
}
