// Zoom and pan by wheel, mouse, touch and buttons, and a small map of the whole picture.
const SHOWN = 60; // minimum part of the picture that stays in the window, pixels
const MARGIN = 20; // around the picture, pixels

let onPaper = false; // whether the picture is being printed
function apply() {
  if (onPaper) return;
  const { clientWidth: w, clientHeight: h } = picture;
  at.x = Math.min(w - SHOWN, Math.max(SHOWN - root.width * at.k, at.x));
  at.y = Math.min(h - SHOWN, Math.max(SHOWN - root.height * at.k, at.y));
  view.setAttribute("transform", `translate(${at.x} ${at.y}) scale(${at.k})`);
  const [left, top, right, bottom] = seen(), { area, k } = painted;
  const inside = left >= area[0] && top >= area[1] && right <= area[2] && bottom <= area[3];
  if (!inside || at.k > 1.4 * k || at.k < k / 1.4 || detailNow() !== painted.detail) paint();
  showMap();
}

const smallest = () => Math.min(0.2, whole());

// Returns the scale at which the whole picture fits into the window, but not so small that it is only pixels wide.
function whole() {
  const { clientWidth: w, clientHeight: h } = picture, narrow = Math.min(1, 48 / root.width);
  return Math.max(narrow, Math.min(1, (w - 2 * MARGIN) / root.width, (h - 2 * MARGIN) / root.height));
}

// Zooms by a factor around the point (x, y) of the window.
function zoom(by, x = picture.clientWidth / 2, y = picture.clientHeight / 2) {
  const k = Math.min(4, Math.max(smallest(), at.k * by));
  Object.assign(at, { k, x: x - (x - at.x) * k / at.k, y: y - (y - at.y) * k / at.k });
  apply();
}

function pan(dx, dy) {
  at.x += dx;
  at.y += dy;
  apply();
}

// `fit` shows the whole picture; `home` the initial view: full size, from the top, centred on the picture or its main line.
function fit() {
  const { clientWidth: w, clientHeight: h } = picture, k = whole();
  Object.assign(at, { k, x: (w - root.width * k) / 2, y: Math.max(MARGIN, (h - root.height * k) / 2) });
  apply();
}

function home() {
  const room = picture.clientWidth - 2 * MARGIN;
  Object.assign(at, { k: 1, x: MARGIN + room / 2 - (root.width <= room ? root.width / 2 : root.axis), y: MARGIN - Z.HEAD - Z.GAP });
  apply();
}

// Centres a part in the window; shows the top of a part that is larger than the window.
function centre(p) {
  const { clientWidth: w, clientHeight: h } = picture;
  if (at.k < 0.6) at.k = 1;
  at.x = w / 2 - (p.x + p.width / 2) * at.k;
  at.y = p.height * at.k > h - 2 * MARGIN ? MARGIN - p.y * at.k : h / 2 - (p.y + p.height / 2) * at.k;
  apply();
}

// Moves a part into the window by the smallest distance.
function reveal(p) {
  const { clientWidth: w, clientHeight: h } = picture, tall = p.open ? Z.HEAD : p.height, wide = Math.min(p.width * at.k, w - 2 * MARGIN);
  const x = p.x * at.k + at.x, y = p.y * at.k + at.y;
  pan(x < MARGIN ? MARGIN - x : Math.min(0, w - MARGIN - x - wide), y < MARGIN ? MARGIN - y : Math.min(0, h - MARGIN - y - tall * at.k));
}

// -- wheel, mouse and touch
picture.addEventListener("wheel", (e) => {
  e.preventDefault();
  const unit = e.deltaMode === 1 ? 16 : 1, { left, top } = picture.getBoundingClientRect();
  if (e.ctrlKey || e.metaKey) zoom(Math.exp(-e.deltaY * unit / 200), e.clientX - left, e.clientY - top);
  else if (e.shiftKey && !e.deltaX) pan(-e.deltaY * unit, 0);
  else pan(-e.deltaX * unit, -e.deltaY * unit);
}, { passive: false });

const fingers = new Map();
let dragged = false;
picture.addEventListener("pointerdown", (e) => {
  if (e.button) return;
  dragged = false;
  fingers.set(e.pointerId, [e.clientX, e.clientY]);
});
addEventListener("pointermove", (e) => {
  const before = fingers.get(e.pointerId);
  if (!before) return;
  const now = [e.clientX, e.clientY], other = [...fingers].find(([id]) => id !== e.pointerId)?.[1];
  if (!dragged && Math.hypot(now[0] - before[0], now[1] - before[1]) < 4) return;
  dragged = true;
  picture.classList.add("dragged");
  fingers.set(e.pointerId, now);
  if (other) {
    const { left, top } = picture.getBoundingClientRect();
    zoom(Math.hypot(now[0] - other[0], now[1] - other[1]) / Math.max(1, Math.hypot(before[0] - other[0], before[1] - other[1])),
      (now[0] + other[0]) / 2 - left, (now[1] + other[1]) / 2 - top);
  }
  pan((now[0] - before[0]) / fingers.size, (now[1] - before[1]) / fingers.size);
});
for (const name of ["pointerup", "pointercancel"]) {
  addEventListener(name, (e) => { fingers.delete(e.pointerId); picture.classList.remove("dragged"); });
}
new ResizeObserver(() => { if (root) apply(); }).observe(picture);

// -- the map
const map = $("map"), pen = map.querySelector("canvas").getContext("2d"), here = map.querySelector("div");
let drawnMap = null; // the layout that the map shows

function showMap() {
  const { clientWidth: w, clientHeight: h } = picture;
  map.hidden = w < 480 || Math.min(1, w / at.k / root.width) * Math.min(1, h / at.k / root.height) > 0.6;
  if (map.hidden) return;
  const k = Math.min(100 / root.width, Math.min(240, h - 140) / root.height), across = Math.max(k, 28 / root.width);
  if (drawnMap !== root) drawMap(across, k);
  const within = (v, most) => Math.min(Math.max(0, v), most);
  const [left, top, right, bottom] = seen().map((v, i) => (i % 2 ? within(v, root.height) * k : within(v, root.width) * across));
  const size = { left, top, width: Math.max(4, right - left), height: Math.max(4, bottom - top) };
  for (const side in size) here.style[side] = `${size[side]}px`;
}

// Draws the map with the given scales in x and y.
function drawMap(across, k) {
  drawnMap = root;
  const { canvas } = pen, style = getComputedStyle(document.documentElement), colours = { rule: style.getPropertyValue("--rule") };
  for (const kind in DATA.kinds) colours[kind] = style.getPropertyValue(`--${kind}-edge`);
  canvas.width = root.width * across * devicePixelRatio;
  canvas.height = root.height * k * devicePixelRatio;
  Object.assign(canvas.style, { width: `${root.width * across}px`, height: `${root.height * k}px` });
  pen.scale(across * devicePixelRatio, k * devicePixelRatio);
  const fill = (p) => {
    if (p.height * k < 0.5 && p.width * across < 2) return;
    pen.fillStyle = colours[p.open ? "rule" : p.shape.kind];
    pen.globalAlpha = p.open ? 0.6 : 0.8;
    pen.fillRect(p.x, p.y, p.width, Math.max(p.height, 1 / k));
    p.inner.forEach(fill);
  };
  root.inner.forEach(fill);
}

map.addEventListener("pointerdown", (e) => { map.setPointerCapture(e.pointerId); goMap(e); });
map.addEventListener("pointermove", (e) => { if (map.hasPointerCapture(e.pointerId)) goMap(e); });
function goMap(e) {
  const box = pen.canvas.getBoundingClientRect();
  at.x = picture.clientWidth / 2 - (e.clientX - box.left) / box.width * root.width * at.k;
  at.y = picture.clientHeight / 2 - (e.clientY - box.top) / box.height * root.height * at.k;
  apply();
}
for (const [id, act] of [["in", () => zoom(1.25)], ["out", () => zoom(0.8)], ["fit", fit], ["home", home]]) $(id).onclick = act;
