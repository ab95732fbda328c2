// Every episode as a cell and, where it was filmed, as a pair of videos.
const FILTERS = [
  ["all", "All", () => true],
  ["fixed", "Fixed by training", (p) => p.group === "fixed"],
  ["broken", "Broken by training", (p) => p.group === "broken"],
  ["failures", "Failures", (p) => p.group === "failed" || p.group === "broken"],
];
const BY_RETURN = [
  FILTERS[0],
  ["better", "Better after training", (p) => p.group === "better"],
  ["worse", "Not better after training", (p) => p.group === "worse"],
];
const MEANING = {
  fixed: "failed before, solved now",
  solved: "solved",
  broken: "solved before, fails now",
  failed: "fails",
  better: "higher return than before",
  worse: "no higher return than before",
  scored: "played",
};

function episodes(run) {
  const box = node("section", { id: "episodes" });
  if (!run.episodes.length) return box;
  const paired = run.episodes.some((p) => p.before && p.after);
  const filters = run.reports_success ? FILTERS : BY_RETURN;
  const offered = paired ? filters : run.reports_success ? [FILTERS[0], FILTERS[3]] : [FILTERS[0]];
  if (!offered.some(([name]) => name === state.filter)) state.filter = "all";
  const fill = () => {
    const keep = filters.find(([name]) => name === state.filter)[2];
    const films = run.episodes.filter(
      (p) => (p.before && p.before.video) || (p.after && p.after.video),
    );
    const shown = films.filter(keep);
    const cells = run.episodes.map((p) => {
      const film = films.includes(p),
        outcome = run.reports_success ? MEANING[p.group] : returns(p),
        title = `state ${p.init}, ${p.task}: ${outcome}`;
      const look = {
        class: `cell ${p.group}${keep(p) ? "" : " off"}`,
        title,
        "aria-label": title,
        "data-init": p.init,
      };
      return film
        ? node("button", { ...look, type: "button", onclick: () => jump(p, keep(p) ? null : fill) })
        : node("span", look);
    });
    const groups = Object.keys(MEANING).filter((g) => run.episodes.some((p) => p.group === g));
    const keys = node(
      "div",
      { class: "row keys" },
      groups.map((g) =>
        node(
          "span",
          {},
          node("span", { class: `cell ${g}` }),
          `${MEANING[g]} (${run.episodes.filter((p) => p.group === g).length})`,
        ),
      ),
      films.length
        ? node("span", {}, node("span", { class: "cell film" }), "has a video: click to watch")
        : null,
    );
    box.replaceChildren(
      ...[
        node(
          "div",
          { class: "row between head" },
          node("h2", {}, "Every episode"),
          tabs(
            offered.map(([name, text, test]) => [name, text, run.episodes.filter(test).length]),
            state.filter,
            (v) => {
              state.filter = v;
              fill();
            },
            "Filter",
          ),
        ),
        node("div", { class: "card" }, node("div", { class: "mosaic" }, cells), keys),
        shown.length
          ? node(
              "div",
              { class: "films" },
              shown.map((p) => film(run, p)),
            )
          : films.length
            ? node("p", { class: "empty" }, "No episode of this kind has a video.")
            : null,
        run.videos_left_out
          ? node(
              "p",
              { class: "muted small", style: { marginTop: "12px" } },
              `The videos of ${run.videos_left_out} more episodes were left out ` +
                "to keep this file small.",
            )
          : null,
      ].filter(Boolean),
    );
  };
  const jump = (p, refill) => {
    if (refill) {
      state.filter = "all";
      refill();
    }
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
  if (video.paused) video.play().catch(() => {});
  else video.pause();
}

const returns = (p) =>
  `return ${[p.before, p.after]
    .filter(Boolean)
    .map((e) => amount(e.return))
    .join(" → ")}`;

function film(run, p) {
  const mark = (e) =>
    run.reports_success
      ? node(
          "span",
          { class: `mark ${e.success ? "yes" : "no"}` },
          e.success ? `✓ solved in ${e.length}` : "✗ failed",
        )
      : node("span", { class: "mark" }, `return ${amount(e.return)} in ${e.length}`);
  const side = (label, e) =>
    e &&
    node(
      "figure",
      {},
      e.video
        ? node("video", {
            muted: true,
            loop: true,
            playsinline: true,
            preload: "auto",
            tabindex: 0,
            title: "click to pause or play",
            "data-film": e.video,
            "aria-label": `${label}, state ${p.init}`,
            onclick: toggle,
            onkeydown: (k) => {
              if (k.key === " " || k.key === "Enter") {
                k.preventDefault();
                toggle(k);
              }
            },
          })
        : node("div", { class: "nofilm" }, "no video"),
      node("figcaption", {}, node("span", {}, label), mark(e)),
    );
  const card = node(
    "article",
    { class: "card film-card", id: `film-${p.init}`, "data-group": p.group },
    node(
      "header",
      {},
      node("span", { title: p.task }, p.task),
      node("span", { class: "muted" }, `state ${p.init}`),
    ),
    node(
      "div",
      { class: "pair" },
      side("before", p.before),
      side(p.before ? "after" : "now", p.after),
    ),
    p.instruction ? node("p", { class: "said" }, `“${p.instruction}”`) : null,
  );
  for (const video of card.querySelectorAll("video")) {
    video.muted = true;
    watcher.observe(video);
  }
  return card;
}

// A video is decoded and played only while it can be seen.
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
const watcher = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting && target.dataset.film) {
        target.src = "data:video/mp4;base64," + target.dataset.film;
        delete target.dataset.film;
      }
      if (isIntersecting && !still && !target.dataset.held) target.play().catch(() => {});
      else target.pause();
    }
  },
  { rootMargin: "200px" },
);
