// The picture as SVG. Only parts and lines in or near the window are drawn, and text only if it is large enough to read.
const picture = $("picture"), view = $("view");
const NEAR = 0.5; // fraction of the window that is also drawn on each side of it
const READABLE = 5; // minimum height of text, pixels
const TINY = 2; // minimum size of a box that is drawn, pixels

let root; // the placed root shape
let spots = new Map(); // key -> placed shape
let elements = new Map(); // placed shape or line -> SVG element
let painted = null; // the area, detail and scale of the last call of `paint`
const fresh = new Set(); // keys of parts that are new or changed, on a page that follows a file
let chosen = null; // the key of the part that the panel describes
let current = null; // the key of the part that has, or last had, keyboard focus
const at = { k: 1, x: 20, y: 20 }; // scale, and position of the picture's corner in the window

// Computes the layout and redraws the picture, after parts were opened or closed.
function draw() {
  known = new Map();
  root = placed(DATA.root, 0, 0);
  spots = new Map();
  const walk = (p, above, level, place) => {
    Object.assign(p, { above, level, place });
    spots.set(p.shape.key, p);
    p.inner.forEach((inner, i) => walk(inner, p, level + 1, i));
  };
  walk(root, null, 0, 0);
  if (!spots.has(current)) current = root.inner[0]?.shape.key ?? null;
  const focused = view.contains(document.activeElement);
  elements = new Map();
  view.replaceChildren();
  paint();
  if (focused) focusCurrent();
}

// Returns the level of detail: 2 for titles and lines, 1 for titles only, 0 for no text.
const detailNow = () => (Z.LINE * at.k >= READABLE ? 2 : Z.TITLE * at.k >= READABLE ? 1 : 0);

// Returns the visible area [left, top, right, bottom] in pixels of the picture, extended by `more` windows on each side.
function seen(more = 0) {
  const { clientWidth: w, clientHeight: h } = picture;
  return [(-at.x - w * more) / at.k, (-at.y - h * more) / at.k, (w * (1 + more) - at.x) / at.k, (h * (1 + more) - at.y) / at.k];
}

// Draws the parts and lines in `area`, reuses existing elements, and removes the others.
function paint(area = seen(NEAR)) {
  const detail = detailNow();
  if (painted?.detail !== detail) elements.clear();
  painted = { area, detail, k: at.k };
  const things = [...inView(root, area)].slice(1);
  const kept = new Map();
  let next = null;
  const focused = view.contains(document.activeElement);
  for (const thing of things) kept.set(thing, elements.get(thing) ?? (thing.points ? wire(thing) : drawn(thing, detail)));
  elements = kept;
  const wanted = new Set(kept.values());
  for (const old of [...view.children]) if (!wanted.has(old)) old.remove();
  next = view.firstChild;
  for (const element of wanted) {
    if (element === next) next = next.nextSibling;
    else view.insertBefore(element, next);
  }
  mark();
  if (focused) focusCurrent();
}

// Yields, in drawing order, a shape, the shapes in it and its lines that are in the area.
function* inView(p, area) {
  yield p;
  if (!p.open || (p !== root && p.width * at.k < 2 * TINY)) return;
  for (const inner of p.inner) {
    const small = Math.max(inner.width, inner.height) * at.k < TINY;
    if ((!small && meets(area, inner.x, inner.y, inner.x + inner.width, inner.bottom)) || holds(inner, current)) yield* inView(inner, area);
  }
  for (const line of p.wires) {
    line.span ??= [0, 1].flatMap((i) => [Math.min(...line.points.map((q) => q[i])), Math.max(...line.points.map((q) => q[i]))]);
    if (meets(area, line.span[0], line.span[2], line.span[1], line.span[3])) yield line;
  }
}

const meets = ([left, top, right, bottom], x0, y0, x1, y1) => x0 <= right && x1 >= left && y0 <= bottom && y1 >= top;

function holds(p, key) {
  for (let q = spots.get(key); q; q = q.above) if (q === p) return true;
  return false;
}

// Updates classes and attributes of existing elements: chosen, found, focusable.
function mark() {
  for (const [thing, element] of elements) {
    if (thing.points) continue;
    const key = thing.shape.key;
    element.classList.toggle("chosen", key === chosen);
    element.classList.toggle("found", matches.has(key));
    element.classList.toggle("fresh", fresh.has(key));
    element.setAttribute("tabindex", key === current ? 0 : -1);
    element.setAttribute("aria-selected", key === chosen);
  }
}

// -- a part
function drawn(p, detail) {
  const { shape } = p;
  const g = shapeOf("g", { class: "part" + (p.open ? " open" : ""), "data-key": shape.key, "data-kind": shape.kind,
    role: "treeitem", "aria-label": described(shape),
    "aria-level": p.level, "aria-posinset": p.place + 1, "aria-setsize": p.above.inner.length },
    ...(shape.symbol ? circle(p) : p.open ? openBox(p, detail) : closedBox(p, detail)));
  if (shape.box) g.setAttribute("aria-expanded", p.open);
  return g;
}

const SIGNS = { "+": "sum", "×": "product", "−": "difference", "÷": "quotient" };
const described = (shape) => [SIGNS[shape.symbol], shape.title, ...shape.lines, ...(shape.notes ?? []),
  ...(shape.repeat ? [`${shape.repeat.count} times`] : [])].filter(Boolean).join(", ");

function circle({ shape, x, y, width, height }) {
  const cx = x + width / 2, cy = y + height / 2, d = 5;
  return [shapeOf("circle", { cx, cy, r: width / 2 }),
    shape.symbol === "+" ? shapeOf("path", { class: "sign", d: `M${cx - d} ${cy}h${2 * d}M${cx} ${cy - d}v${2 * d}` })
      : textAt(shape.symbol, cx, cy + 4.5, "title middle")];
}

const textAt = (text, x, y, of) => shapeOf("text", { x, y, class: of }, text);

// The box; without text (zoomed out) it has the border colour of its kind, which is stronger.
const frame = ({ shape, x, y, width, height, open }, detail) => shapeOf("rect", { x, y, width, height, rx: 8,
  style: `fill:var(--${open ? "open" : detail ? shape.kind : `${shape.kind}-edge`});stroke:var(--${shape.kind}-edge)` });

// The title row, beginning at x: the mark of the kind, the title, and the sign that it can be opened.
function row({ shape, y, open }, x) {
  const end = x + Z.ICON + widthOf(shape.title, Z.TITLE);
  const drawnAt = (x, y, more) => shapeOf("path", { transform: `translate(${x} ${y})`, ...more });
  const made = [drawnAt(x, y + 9.5, { class: "mark", d: DATA.kinds[shape.kind][1], style: `stroke:var(--${shape.kind}-edge)` }),
    textAt(shape.title, x + Z.ICON, y + 19, "title")];
  if (shape.box) made.push(drawnAt(end + 6, y + 12.5, { class: "opens", d: open ? "m0 0 3.5 4 3.5-4" : "m1.5-1.5 4 3.5-4 3.5" }));
  if (shape.repeat) made.push(badge(shape, end + Z.ICON + 8, y + 5));
  return made;
}

// The number of rounds of a repeat; a click draws all rounds, or only the first.
const timesOf = (shape) => `× ${shape.repeat.count}`;
function badge(shape, x, y) {
  const width = widthOf(timesOf(shape), Z.TITLE) + 16, all = opened.has(shape.key + Z.ALL);
  return shapeOf("g", { class: "times" + (all ? " all" : "") },
    shapeOf("rect", { x, y, width, height: 19, rx: 9.5 }), textAt(timesOf(shape), x + width / 2, y + 14, "title middle"));
}

function closedBox(p, detail) {
  const { shape, x, y, width } = p, made = [frame(p, detail)];
  if (!detail) return made;
  const wide = widthOf(shape.title, Z.TITLE) + Z.ICON * (shape.box ? 2 : 1);
  const more = shape.repeat ? widthOf(timesOf(shape), Z.TITLE) + 24 : 0;
  made.push(...row(p, x + (width - wide - more) / 2));
  if (detail < 2) return made;
  const lines = [...shape.lines, ...(shape.notes ?? [])];
  lines.forEach((t, i) => made.push(textAt(t, x + width / 2, y + 19 + Z.LEADING * (i + 1), "middle" + (i < shape.lines.length ? "" : " note"))));
  return made;
}

function openBox(p, detail) {
  const { x, y, width } = p, made = [frame(p, detail)];
  made.push(shapeOf("rect", { class: "bar", x: x + 1, y: y + 1, width: width - 2, height: Z.HEAD - 2, rx: 7 }));
  if (detail) made.push(...row(p, x + 12));
  return made;
}

// -- a line
const wire = (w) => shapeOf("path", { class: "wire", role: "presentation",
  d: "M" + w.points.map((p) => p.map((v) => +v.toFixed(2)).join(" ")).join("L"),
  ...(w.target ? { "marker-end": "url(#arrow)" } : {}) });
