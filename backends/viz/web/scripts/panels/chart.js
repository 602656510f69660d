// Line charts with labels at the ends, values under the pointer, and the data as a table.
const STROKES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "1 2"]; // dashes also distinguish the lines
const tabRoom = () => (innerWidth <= 760 ? innerWidth : Math.min(640, innerWidth * 0.55)) - 50; // width of the content of a wide panel, pixels

// Returns an axis from pixel `from` to `to`: { at: value -> pixel, ticks }.
function axis({ low, high, log, base = 10, format }, from, to) {
  const f = log ? Math.log : (v) => v, [a, b] = [f(low), f(high)];
  const ticks = log ? powers(low, high, base) : evenly(low, high);
  return { at: (v) => from + (to - from) * (f(v) - a) / (b - a || 1), ticks: ticks.map((v) => [v, format(v)]), low, high };
}

// Returns powers of a base, at most nine.
function powers(low, high, base) {
  const f = (v) => Math.log(v) / Math.log(base), first = Math.ceil(f(low) - 1e-9), final = Math.floor(f(high) + 1e-9);
  const every = Math.ceil((final - first + 1) / 9), found = [];
  for (let n = first; n <= final; n++) if (n % every === 0) found.push(base ** n);
  return found;
}

function evenly(low, high) {
  const raw = (high - low) / 6 || 1, unit = 10 ** Math.floor(Math.log10(raw)), step = unit * [1, 2, 5, 10].find((m) => m * unit >= raw);
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) found.push(+v.toPrecision(12));
  return found;
}

// Returns a chart of `series` [{ name, points: [[x, y], …] }] with the same x in all; y is null where it is unknown.
// x and y: { title, log, base, low, high, format }; lines: [{ x | y, name }]; `titled` describes the chart.
function chart({ titled, x, y, series, lines = [], height = 260 }) {
  const width = tabRoom(), left = 62, right = Math.max(...series.map((s) => s.name.length), 4) * 6.2 + 16, top = 14, bottom = height - 38;
  const across = axis(x, left, width - right), up = axis(y, bottom, top);
  const text = (t, px, py, anchor = "start", of = "") => shapeOf("text", { x: px, y: py, "text-anchor": anchor, class: of }, t);
  const svg = shapeOf("svg", { class: "chart", width, height, role: "img", "aria-label": titled, viewBox: `0 0 ${width} ${height}` });
  for (const [v, told] of up.ticks) svg.append(shapeOf("path", { class: "grid", d: `M${left} ${up.at(v)}H${width - right}` }), text(told, left - 7, up.at(v) + 4, "end"));
  for (const [v, told] of across.ticks) svg.append(shapeOf("path", { class: "grid", d: `M${across.at(v)} ${bottom}v4` }), text(told, across.at(v), bottom + 17, "middle"));
  svg.append(shapeOf("path", { class: "axis", d: `M${left} ${top}V${bottom}H${width - right}` }), text(x.title, (left + width - right) / 2, height - 5, "middle", "soft"), text(y.title, left, top - 4, "start", "soft"));
  lines.forEach((line, i) => {
    if (line.x !== undefined && line.x >= x.low && line.x <= x.high) svg.append(shapeOf("path", { class: "line", d: `M${across.at(line.x)} ${top}V${bottom}` }), text(line.name, across.at(line.x) - 5, bottom - 7 - 13 * i, "end", "soft"));
    if (line.y !== undefined && line.y >= y.low && line.y <= y.high) svg.append(shapeOf("path", { class: "line", d: `M${left} ${up.at(line.y)}H${width - right}` }), text(line.name, left + 5, up.at(line.y) + (up.at(line.y) < top + 16 ? 13 : -4), "start", "soft"));
  });
  const ends = [];
  series.forEach((s, i) => {
    const known = s.points.filter(([, v]) => v !== null && v >= y.low && v <= y.high * 1.0001);
    if (!known.length) return;
    svg.append(shapeOf("path", { class: `curve c${i % 6}`, d: "M" + known.map(([a, b]) => `${across.at(a).toFixed(1)} ${up.at(b).toFixed(1)}`).join("L"), "stroke-dasharray": STROKES[i % 6] }));
    ends.push([i, s.name, across.at(known.at(-1)[0]), up.at(known.at(-1)[1])]);
  });
  apart(ends).forEach(([i, name, px, py]) => svg.append(text(name, px + 7, py + 4, "start", `end c${i % 6}`)));
  const cursor = shapeOf("path", { class: "cursor" }), value = el("output", { class: "values" }, "");
  svg.append(cursor);
  const xs = series[0].points.map(([v]) => v);
  svg.addEventListener("pointermove", (e) => {
    const px = (e.clientX - svg.getBoundingClientRect().left), i = xs.reduce((best, v, j) => (Math.abs(across.at(v) - px) < Math.abs(across.at(xs[best]) - px) ? j : best), 0);
    cursor.setAttribute("d", `M${across.at(xs[i])} ${top}V${bottom}`);
    value.textContent = `${x.format(xs[i])}: ` + series.map((s) => `${s.name} ${s.points[i][1] === null ? "–" : y.format(s.points[i][1])}`).join(" · ");
  });
  svg.addEventListener("pointerleave", () => { cursor.removeAttribute("d"); value.textContent = ""; });
  return el("figure", {}, svg, value, asTable(titled, [x.title, ...series.map((s) => s.name)], xs.map((v, i) => [x.format(v), ...series.map((s) => (s.points[i][1] === null ? "–" : y.format(s.points[i][1])))])));
}

// Labels at the ends of lines, moved vertically so that they do not overlap.
function apart(ends, least = 13) {
  const sorted = [...ends].sort((a, b) => a[3] - b[3]);
  for (let round = 0; round < 30; round++) {
    for (let i = 1; i < sorted.length; i++) {
      const gap = sorted[i][3] - sorted[i - 1][3];
      if (gap < least) { sorted[i - 1][3] -= (least - gap) / 2; sorted[i][3] += (least - gap) / 2; }
    }
  }
  return sorted;
}

const asTable = (titled, columns, rows) => el("details", {}, el("summary", {}, "as a table"), el("div", { class: "scroll" }, el("table", { class: "values" }, el("caption", {}, titled),
  el("thead", {}, el("tr", {}, columns.map((c) => el("th", { scope: "col" }, c)))),
  el("tbody", {}, rows.map((row) => el("tr", {}, row.map((c, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }, c))))))));

// Returns low, 2 · low, 4 · low, … and high.
function doublings(low, high) {
  const found = [];
  for (let v = low; v < high; v *= 2) found.push(v);
  return [...found, high];
}

// Returns a grid of squares: `value(row, column)` is the CSS class of a square, if any; `say(row, column)` its description.
function squares({ titled, rows, columns, value, say, size = 11, gap = 0 }) {
  const step = size + gap, svg = shapeOf("svg", { class: "squares", width: columns * step, height: rows * step, role: "img", "aria-label": titled, viewBox: `0 0 ${columns * step} ${rows * step}` });
  const paths = new Map();
  for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
    const of = value(r, c) ?? "none";
    paths.set(of, (paths.get(of) ?? "") + `M${c * step + 0.5} ${r * step + 0.5}h${size - 1}v${size - 1}h${1 - size}z`);
  }
  for (const [of, d] of paths) svg.append(shapeOf("path", { class: of, d }));
  const told = el("output", { class: "values" }, "");
  svg.addEventListener("pointermove", (e) => {
    const box = svg.getBoundingClientRect(), r = Math.floor((e.clientY - box.top) / step), c = Math.floor((e.clientX - box.left) / step);
    told.textContent = r >= 0 && c >= 0 && r < rows && c < columns ? say(r, c) : "";
  });
  svg.addEventListener("pointerleave", () => { told.textContent = ""; });
  return [svg, told];
}

let resized = 0; // charts are redrawn, because they are as wide as the panel
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => { if (tabs.get(open.tab)?.wide) refresh(); }, 120); });
