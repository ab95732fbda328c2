"use strict";
// Small line charts in SVG. Text enters the page only as text nodes, never as markup.
const SVG = "http://www.w3.org/2000/svg";

function node(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "circle", "rect", "text"].includes(tag);
  const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "style") Object.assign(made.style, value);
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : String(child));
  }
  return made;
}

const percent = (x) => (100 * x).toFixed(0) + "%";

function compact(x) {
  if (x === null || x === undefined) return "–";
  const size = Math.abs(x);
  if (size >= 1e6) return +(x / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return +(x / 1e3).toPrecision(3) + "k";
  if (size !== 0 && size < 1e-3) return x.toExponential(1);
  return String(+x.toPrecision(3));
}

function ticks(low, high, count) {
  const raw = (high - low) / (count + 0.5) || 1;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * ([1, 2, 2.5, 5, 10].find((m) => m * unit >= raw) || 10);
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++)
    out.push(k * step);
  return out;
}

// series: [{label, color, points: [[x, y, lo, hi], ...], faint, dots, dashed}]; y null leaves a gap.
function drawChart(box, series, options) {
  const plot = node("svg", { role: "img", "aria-label": options.title });
  const tip = node("div", { class: "tip", hidden: true });
  box.append(plot, tip);
  let shown = 0;
  const draw = () => {
    const width = box.clientWidth - parseFloat(getComputedStyle(box).paddingLeft) * 2;
    if (!(width > 0) || width === shown) return; // NaN before the box is in the page
    shown = width;
    paint(plot, tip, box, series, { ...options, width });
  };
  new ResizeObserver(draw).observe(box); // this also draws it for the first time
}

function range(values, fallback) {
  const real = values.filter((v) => v !== null && v !== undefined);
  return real.length ? [Math.min(...real), Math.max(...real)] : fallback;
}

function paint(plot, tip, box, series, { width, height, yRange, format, xFormat }) {
  plot.replaceChildren();
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  plot.setAttribute("height", height);
  const all = series.flatMap((s) => s.points);
  const x0 = 0,
    x1 =
      range(
        all.map((p) => p[0]),
        [0, 1],
      )[1] || 1;
  let [y0, y1] =
    yRange ||
    range(
      all.flatMap((p) => p.slice(1)),
      [0, 1],
    );
  if (!yRange) {
    const room = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
    [y0, y1] = [y0 >= 0 && y0 < y1 - y0 ? 0 : y0 - room, y1 + room];
  }
  const yTicks = ticks(y0, y1, height > 200 ? 5 : 3);
  const left = 10 + 6.2 * Math.max(...yTicks.map((v) => format(v).length));
  const area = { left, right: width - 10, top: 8, bottom: height - 24 };
  const X = (x) => area.left + ((x - x0) / (x1 - x0)) * (area.right - area.left);
  const Y = (y) =>
    area.bottom - ((Math.min(Math.max(y, y0), y1) - y0) / (y1 - y0)) * (area.bottom - area.top);
  for (const v of yTicks) {
    plot.append(node("line", { class: "grid", x1: area.left, x2: area.right, y1: Y(v), y2: Y(v) }));
    plot.append(node("text", { x: area.left - 7, y: Y(v) + 4, "text-anchor": "end" }, format(v)));
  }
  for (const v of ticks(x0, x1, Math.max(3, Math.min(8, Math.floor(width / 75))))) {
    const end = X(v) > area.right - 14;
    plot.append(
      node("text", { x: X(v), y: height - 6, "text-anchor": end ? "end" : "middle" }, xFormat(v)),
    );
  }
  for (const s of series) paintSeries(plot, s, X, Y);
  hover(plot, tip, box, series, { X, Y, x0, x1, area, format, xFormat });
}

function paintSeries(plot, s, X, Y) {
  const real = s.points.filter((p) => p[1] !== null && p[1] !== undefined);
  const at = (x, y) => `${X(x).toFixed(1)},${Y(y).toFixed(1)}`;
  if (real.length && real.every((p) => p.length > 2)) {
    const band =
      "M" +
      real.map((p) => at(p[0], p[3])).join("L") +
      "L" +
      real
        .map((p) => at(p[0], p[2]))
        .reverse()
        .join("L") +
      "Z";
    plot.append(node("path", { d: band, style: { fill: s.color, opacity: 0.14 } }));
  }
  let d = "",
    pen = "M";
  for (const p of s.points) {
    if (p[1] === null || p[1] === undefined) {
      if (!s.join) pen = "M";
      continue;
    }
    d += pen + at(p[0], p[1]);
    pen = "L";
  }
  const look = {
    fill: "none",
    stroke: s.color,
    strokeWidth: s.faint ? 1.4 : 2.2,
    opacity: s.faint ? 0.5 : 1,
    strokeLinejoin: "round",
    strokeLinecap: "round",
    strokeDasharray: s.dashed ? "2 6" : "none",
  };
  plot.append(node("path", { d, style: look }));
  if (s.dots) {
    for (const p of real) {
      if (p.length > 2)
        plot.append(
          node("line", {
            x1: X(p[0]),
            x2: X(p[0]),
            y1: Y(p[2]),
            y2: Y(p[3]),
            style: { stroke: s.color, strokeWidth: 1.5, opacity: 0.55 },
          }),
        );
      plot.append(
        node("circle", {
          cx: X(p[0]),
          cy: Y(p[1]),
          r: 4,
          style: { fill: s.color, stroke: "var(--card)", strokeWidth: 2 },
        }),
      );
    }
  }
}

function hover(plot, tip, box, series, { X, Y, x0, x1, area, format, xFormat }) {
  const marks = node("g", {});
  const catcher = node("rect", {
    x: area.left,
    y: area.top,
    width: Math.max(0, area.right - area.left),
    height: Math.max(0, area.bottom - area.top),
    fill: "transparent",
  });
  plot.append(marks, catcher);
  const hide = () => {
    tip.hidden = true;
    marks.replaceChildren();
  };
  const show = (event) => {
    const scale = plot.viewBox.baseVal.width / plot.getBoundingClientRect().width;
    const px = (event.clientX - plot.getBoundingClientRect().left) * scale;
    const x = x0 + ((px - area.left) / (area.right - area.left)) * (x1 - x0);
    const near = series
      .map((s) => {
        const real = s.points.filter((p) => p[1] !== null && p[1] !== undefined);
        return real.length
          ? [s, real.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a))]
          : null;
      })
      .filter(Boolean);
    if (!near.length) return hide();
    const at = near.reduce((a, b) => (Math.abs(b[1][0] - x) < Math.abs(a[1][0] - x) ? b : a))[1][0];
    marks.replaceChildren(
      node("line", { class: "cross", x1: X(at), x2: X(at), y1: area.top, y2: area.bottom }),
      ...near.map(([s, p]) =>
        node("circle", { cx: X(p[0]), cy: Y(p[1]), r: 3.5, style: { fill: s.color } }),
      ),
    );
    tip.replaceChildren(
      node("div", { style: { opacity: 0.7 } }, xFormat(at)),
      ...near.map(([s, p]) =>
        node(
          "div",
          {},
          node("span", {
            class: "dot",
            style: { background: s.color, opacity: s.faint ? 0.5 : 1 },
          }),
          s.label + "  ",
          node("strong", {}, format(p[1])),
          p.length > 2 ? ` [${format(p[2])}, ${format(p[3])}]` : "",
        ),
      ),
    );
    tip.hidden = false;
    const half = tip.offsetWidth / 2,
      offset =
        plot.offsetLeft || plot.getBoundingClientRect().left - box.getBoundingClientRect().left;
    const centre = Math.min(Math.max(X(at) / scale + offset, half + 4), box.clientWidth - half - 4);
    const top = plot.getBoundingClientRect().top - box.getBoundingClientRect().top;
    Object.assign(tip.style, {
      left: centre - half + "px",
      top: Math.max(4, top - tip.offsetHeight + 6) + "px",
    });
  };
  catcher.addEventListener("pointermove", show);
  catcher.addEventListener("pointerdown", show);
  catcher.addEventListener("pointerleave", hide);
}

// A score is a success rate (it has k) or a mean return. One episode has no interval: lo is null.
const isRate = (score) => score.k !== undefined;
const amount = (x) =>
  x === null
    ? "–"
    : Math.abs(x) >= 100
      ? Math.round(x).toLocaleString("en")
      : String(+x.toPrecision(3));
function valueText(score) {
  if (!score.n) return "–";
  return isRate(score) ? percent(score.value) : amount(score.value);
}

function scoreText(score) {
  if (!score.n) return "–";
  const bound = isRate(score) ? (x) => (100 * x).toFixed(0) : amount;
  return valueText(score) + (score.lo === null ? "" : ` [${bound(score.lo)}, ${bound(score.hi)}]`);
}

// The range of the bars of some scores: 0 to 100%, or all mean returns with their intervals.
function span(scores) {
  const known = scores.filter(Boolean);
  if (known.every(isRate)) return [0, 1];
  const [low, high] = range(
    known.flatMap((s) => [s.value, s.lo, s.hi]),
    [0, 1],
  );
  const room = (high - low) * 0.05 || 1;
  return [low - room, high + room];
}

// A score with its interval on a line.
function rangeBar(score, color, [low, high]) {
  const x = (v) => `${((100 * (v - low)) / (high - low)).toFixed(2)}%`;
  const wide = `${((100 * (score.hi - score.lo)) / (high - low)).toFixed(2)}%`;
  return node(
    "svg",
    { class: "bar", role: "img", "aria-label": scoreText(score) },
    node("rect", { x: 0, y: 7, width: "100%", height: 2, rx: 1, style: { fill: "var(--line)" } }),
    score.lo !== null &&
      node("rect", {
        x: x(score.lo),
        y: 4,
        width: wide,
        height: 8,
        rx: 4,
        style: { fill: color, opacity: 0.3 },
      }),
    score.value !== null &&
      node("circle", { cx: x(score.value), cy: 8, r: 5, style: { fill: color } }),
  );
}
