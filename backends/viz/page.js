"use strict";
// Layout as in place.py: sizes of boxes from the inside out, then corners, then lines.
const DATA = JSON.parse(document.getElementById("data").textContent);
const Z = DATA.sizes, START = -1, END = -2;
const opened = new Set(DATA.opened);

// -- repeats: the number at place `depth` of every name, moved on
const moved = (text, depth, by) => {
  const words = text.split(".");
  if (words.length > depth) words[depth] = words[depth].replace(/\d+/g, (n) => +n + by);
  return words.join(".");
};

function renamed(shape, depth, by, prefix) {
  const move = (text) => (text.startsWith(prefix) ? moved(text, depth, by) : text);
  return JSON.parse(JSON.stringify(shape, (name, value) =>
    typeof value === "string" && name !== "recipe" && value.includes(".") ? move(value)
      : value && value.repeat && value.repeat.depth === depth ? { ...value } : value));
}

function shown(shape) {
  if (!shape.repeat || !opened.has(shape.key + Z.ALL)) return shape;
  if (shape.times) return shape.times;
  const { count, depth, period, parallel, once } = shape.repeat;
  const first = once.inner ? once : { ...once, inner: shape.inner, box: shape.box, wires: shape.wires };
  const prefix = first.key.split(".").slice(0, depth).map((w) => w + ".").join("");
  const inner = [...Array(count).keys()].map((i) => {
    const made = i ? renamed(first, depth, i * period, prefix) : { ...first };
    made.title = first.title.replace(/\d+/g, (n) => +n + i * period);
    made.closed = shape.repeat.closed;
    made.head = shape.repeat.head;
    return made;
  });
  const all = [...inner.keys()];
  return shape.times = { ...shape, inner,
    box: parallel ? ["c", ["b", ...all.map((i) => ["c", i])]] : ["c", ...all],
    wires: parallel ? all.flatMap((i) => [[START, i, [], "fork", [0], []], [i, END, [], "merge", [0], []]])
      : [...all.map((i) => [i ? i - 1 : START, i, [], "", [], []]), [count - 1, END, [], "", [], []]] };
}

// -- how large: [width, height, axis]
const stacked = (sizes) => {
  const axis = Math.max(...sizes.map((s) => s[2]));
  return [axis + Math.max(...sizes.map((s) => s[0] - s[2])), sizes.reduce((h, s) => h + s[1], 0) + Z.GAP * (sizes.length - 1), axis];
};

const beside = (sizes, gap) => {
  const width = sizes.reduce((w, s) => w + s[0], 0) + gap * (sizes.length - 1), half = sizes.length >> 1;
  const middle = sizes.length % 2 ? sizes.slice(0, half).reduce((w, s) => w + s[0] + gap, 0) + sizes[half][2] : width / 2;
  return [width, Math.max(...sizes.map((s) => s[1])), middle];
};

function size(given) {
  const shape = shown(given);
  if (!shape.box || !opened.has(shape.key)) return shape.closed;
  const [w, h, axis] = boxSize(shape, shape.box);
  return [Math.max(w + 2 * Z.PAD, shape.head), Z.HEAD + Z.GAP + h + Z.GAP, Z.PAD + axis];
}

let known = new Map();
function boxSize(shape, box) {
  if (typeof box === "number") return size(shape.inner[box]);
  let of = known.get(shape);
  if (!of) known.set(shape, of = new Map());
  if (!of.has(box)) of.set(box, measured(shape, box));
  return of.get(box);
}

function measured(shape, [kind, ...rest]) {
  if (kind === "|") return [Z.PASS, 0, Z.PASS / 2];
  if (kind === "c") return stacked(rest.map((b) => boxSize(shape, b)));
  if (kind === "r") {
    const [lanes, ...rows] = rest;
    const [w, h, axis] = stacked(rows.map((row) => beside(row.map((b) => boxSize(shape, b)), Z.APART / 2)));
    return [w, h + Z.ACROSS * lanes.reduce((a, b) => a + b, 0), axis];
  }
  const found = beside(rest.map((b) => boxSize(shape, b)), Z.APART);
  return kind === "p" ? [found[0] + Z.LANE, found[1], Z.LANE / 2] : found;
}

// -- where
function placed(given, x, y) {
  const shape = shown(given), [width, height, axis] = size(given);
  const made = { shape, x, y, width, height, axis: x + axis, bottom: y + height, open: !!shape.box && opened.has(shape.key), inner: [], wires: [] };
  if (made.open) {
    const inside = { shape, spots: {}, spans: {}, tops: {}, rooms: {} };
    put(inside, shape.box, x + Z.PAD, y + Z.HEAD + Z.GAP, []);
    made.inner = shape.inner.map((_, i) => inside.spots[i]);
    made.wires = wires(made, inside);
  }
  return made;
}

function put(inside, box, x, y, path) {
  const shape = inside.shape;
  if (typeof box === "number") { inside.spots[box] = placed(shape.inner[box], x, y); return; }
  const [kind, ...rest] = box, [, height, axis] = boxSize(shape, box);
  inside.spans[path] = [y, y + height];
  if (kind === "c") {
    rest.forEach((b, i) => {
      const [, h, a] = boxSize(shape, b);
      put(inside, b, x + axis - a, y, [...path, i]);
      y += h + Z.GAP;
    });
  } else if (kind !== "r") {
    x += kind === "p" ? Z.LANE : 0;
    rest.forEach((b, i) => { put(inside, b, x, y, [...path, i]); x += boxSize(shape, b)[0] + Z.APART; });
  } else {
    const [lanes, ...rows] = rest, tops = inside.tops[path] = [];
    rows.forEach((row, r) => {
      y += Z.ACROSS * lanes[r];
      tops.push(y);
      const sizes = row.map((b) => boxSize(shape, b)), whole = beside(sizes, Z.APART / 2);
      let left = x + axis - whole[2];
      row.forEach((b, c) => {
        if (b[0] === "|") inside.rooms[[b[1], b[2], r]] = left + sizes[c][2];
        else put(inside, b, left, y, [...path, r, c]);
        left += sizes[c][0] + Z.APART / 2;
      });
      y += whole[1] + Z.GAP;
    });
    tops.push(y + Z.ACROSS * lanes.at(-1));
  }
}

// -- lines
function wires(around, inside) {
  const shifts = arrivals(around, inside);
  return inside.shape.wires.map(([source, target, values, bend, region, lanes]) => {
    const a = inside.spots[source], b = inside.spots[target];
    const start = a ? [a.axis, a.bottom] : [around.axis, around.y + Z.HEAD];
    const end = b ? [b.axis + shifts[[source, target]], b.y] : [around.axis, around.bottom];
    let points = bent([source, target, bend, region, lanes], start, end, inside);
    if (b && b.shape.symbol && bend === "merge" && Math.abs(start[0] - end[0]) > 1) {
      const side = start[0] < b.x ? b.x : b.x + b.width, y = (b.y + b.bottom) / 2;
      points = [start, [start[0], y], [side, y]];
    }
    return { source: a && a.shape, target: b && b.shape, values, points: corners(points) };
  });
}

function bent([source, target, bend, region, lanes], start, end, inside) {
  if (bend === "rows") {
    const points = [start];
    let x = start[0];
    for (const [r, lane] of lanes) {
      const y = inside.tops[region][r] - Z.ACROSS * (lane + 1), to = inside.rooms[[source, target, r]] ?? end[0];
      points.push([x, y], [to, y]);
      x = to;
    }
    return [...points, end];
  }
  if (!bend) return [start, end];
  const [top, bottom] = inside.spans[region], y = bend === "fork" ? top - Z.GAP / 2 : bottom + Z.GAP / 2;
  return [start, [start[0], y], [end[0], y], end];
}

function arrivals(around, inside) {
  const lines = inside.shape.wires.filter((l) => l[1] !== END), found = {};
  for (const [s, t] of lines) found[[s, t]] = 0;
  for (const [target, spot] of Object.entries(inside.spots)) {
    const sources = lines.filter((l) => l[1] === +target).map((l) => l[0]);
    if (sources.length < 2 || spot.shape.symbol) continue;
    const at = (s) => (inside.spots[s] ?? around).axis;
    const order = [...sources].sort((a, b) => at(a) - at(b));
    const straight = order.findIndex((s) => Math.abs(at(s) - spot.axis) < 0.5);
    const zero = straight < 0 ? (order.length - 1) / 2 : straight;
    const room = Math.min(spot.axis - spot.x, spot.x + spot.width - spot.axis) - Z.EDGE;
    const step = Math.min(Z.SPREAD, room / Math.max(zero, order.length - 1 - zero));
    order.forEach((s, i) => { found[[s, target]] = (i - zero) * step; });
  }
  return found;
}

const near = (p, q) => Math.abs(p[0] - q[0]) < 0.01 && Math.abs(p[1] - q[1]) < 0.01;
function corners(points) {
  const apart = points.filter((p, i) => i === points.length - 1 || !near(p, points[i + 1]));
  return apart.filter((p, i) => !i || i === apart.length - 1 ||
    ![0, 1].some((k) => Math.abs(apart[i - 1][k] - p[k]) < 0.01 && Math.abs(p[k] - apart[i + 1][k]) < 0.01));
}

// -- drawing
const SVG = "http://www.w3.org/2000/svg", view = document.getElementById("view"), picture = document.getElementById("picture");
const element = (name, given, ...children) => {
  const made = document.createElementNS(SVG, name);
  for (const [k, v] of Object.entries(given)) made.setAttribute(k, v);
  made.append(...children);
  return made;
};

let root, chosen = null;
function draw() {
  known = new Map();
  root = placed(DATA.root, 0, 0);
  view.replaceChildren(...root.inner.flatMap(drawn), ...root.wires.map(wire));
}

function drawn(p) {
  const { shape, x, y, width, height } = p, cx = x + width / 2, made = [];
  if (shape.symbol) {
    made.push(element("circle", { cx, cy: y + height / 2, r: width / 2 }));
    const d = 5, cy = y + height / 2;
    made.push(shape.symbol === "+" ? element("path", { class: "sign", d: `M${cx - d} ${cy}h${2 * d}M${cx} ${cy - d}v${2 * d}` })
      : element("text", { x: cx, y: cy + 4, "text-anchor": "middle", class: "title" }, shape.symbol));
  } else {
    made.push(element("rect", { x, y, width, height, rx: 8, fill: `var(--${p.open ? "open" : shape.kind})` }));
    const text = (t, y, cls = "") => element("text", p.open ? { x: x + 12, y, class: cls } : { x: cx, y, "text-anchor": "middle", class: cls }, t);
    made.push(text(shape.title, y + 19, "title"));
    if (!p.open) {
      const lines = shape.notes ? [...shape.lines, noted(shape.notes)] : shape.lines;
      lines.forEach((t, i) => made.push(text(t, y + 19 + Z.LEADING * (i + 1), i < shape.lines.length ? "" : "note")));
    }
    if (shape.repeat) made.push(element("text", { x: x + width - 10, y: y + 19, "text-anchor": "end", class: "title" }, `× ${shape.repeat.count}`));
  }
  const g = element("g", { class: "part" + (chosen === shape.key ? " chosen" : ""), "data-key": shape.key, tabindex: 0,
    role: shape.box ? "button" : "img", "aria-label": `${shape.title}, ${shape.lines.join(", ")}` }, element("title", {}, shape.key), ...made);
  if (shape.box) g.setAttribute("aria-expanded", p.open);
  return [g, ...p.inner.flatMap(drawn), ...p.wires.map(wire)];
}

const noted = (notes) => "with " + [...new Set(notes.map((n) => n.split(".").at(-1)))].join(", ");
const wire = (w) => element("path", { class: "wire", d: "M" + w.points.map((p) => p.map((v) => +v.toFixed(2)).join(" ")).join("L"),
  ...(w.target ? { "marker-end": "url(#arrow)" } : {}) }, element("title", {}, w.values.join(", ")));

// -- moving
let k = 1, tx = 20, ty = 20;
const apply = () => view.setAttribute("transform", `translate(${tx} ${ty}) scale(${k})`);
function zoom(by, x, y) { const to = Math.min(4, Math.max(0.05, k * by)); tx = x - (x - tx) * to / k; ty = y - (y - ty) * to / k; k = to; apply(); }
picture.addEventListener("wheel", (e) => { e.preventDefault(); if (e.ctrlKey || e.metaKey) zoom(Math.exp(-e.deltaY / 200), e.offsetX, e.offsetY); else { tx -= e.deltaX; ty -= e.deltaY; apply(); } }, { passive: false });
let drag = null;
picture.addEventListener("pointerdown", (e) => { drag = { x: e.clientX, y: e.clientY, moved: false }; });
addEventListener("pointermove", (e) => { if (!drag) return; const dx = e.clientX - drag.x, dy = e.clientY - drag.y; if (drag.moved || Math.hypot(dx, dy) > 3) { drag = { x: e.clientX, y: e.clientY, moved: true }; tx += dx; ty += dy; apply(); } });
addEventListener("pointerup", () => { setTimeout(() => { drag = null; }); });
function fit() {
  const { clientWidth: w, clientHeight: h } = picture;
  k = Math.min(1, (w - 40) / root.width, (h - 40) / root.height);
  tx = (w - root.width * k) / 2; ty = Math.max(0, (h - root.height * k) / 2) ;
  apply();
}

function toggle(key) {
  const before = find(root, key);
  if (opened.has(key)) opened.delete(key); else opened.add(key);
  draw();
  const after = find(root, key);
  if (before && after) { tx += (before.x - after.x) * k; ty += (before.y - after.y) * k; apply(); }
}
const find = (p, key) => p.shape.key === key ? p : p.inner.reduce((f, i) => f || find(i, key), null);
view.addEventListener("click", (e) => {
  const g = e.target.closest("g.part");
  if (!g || (drag && drag.moved)) return;
  const p = find(root, g.dataset.key);
  choose(p.shape);
  if (p.shape.box) toggle(p.shape.key); else draw();
});

// -- the panel
const panel = document.getElementById("panel");
function choose(shape) {
  chosen = shape.key;
  panel.hidden = false;
  const html = (t) => String(t).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const rows = (pairs) => `<dl>${pairs.map(([a, b]) => `<dt>${html(a)}</dt><dd>${html(b)}</dd>`).join("")}</dl>`;
  panel.innerHTML = `<h2>${html(shape.title)}</h2><div>${html(shape.key)}</div>` + (shape.ops || []).map((v) =>
    `<h3>${html(v.op)}</h3>` + rows([...Object.entries(v.attrs), ...v.reads, ...v.makes]) +
    v.weights.map((w) => rows([["weight", w[0]], ["shape", `${w[2]}${w[1]}`], ["recipe", w[4]]])).join("")).join("");
}

document.getElementById("legend").innerHTML = Object.entries(DATA.kinds).map(([kind, name]) => `<span class="kind"><i style="background:var(--${kind})"></i>${name}</span>`).join("");
document.getElementById("theme").onclick = () => document.documentElement.classList.toggle("dark");
document.getElementById("fit").onclick = fit;
draw();
fit();
