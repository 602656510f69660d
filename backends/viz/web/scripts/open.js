// Opening and closing of parts.
let base = "first"; // the set of open parts before single parts were opened or closed: a key of `bases`

function keysOf(shape, all, found = new Set()) {
  if (!shape.box) return found;
  found.add(shape.key);
  if (all && shape.repeat) found.add(shape.key + Z.ALL);
  for (const inner of (all && shape.repeat ? unrolled(shape) : shape).inner) keysOf(inner, all, found);
  return found;
}

const bases = {
  first: () => DATA.opened,
  none: () => [DATA.root.key],
  parts: () => keysOf(DATA.root, false),
  every: () => keysOf(DATA.root, true),
};

// Returns the number of shapes, with all rounds of all repeats.
function amount(shape) {
  const inner = (shape.inner ?? []).reduce((n, i) => n + amount(i), 0);
  return shape.repeat ? 1 + shape.repeat.count * (1 + inner) : 1 + inner;
}

const limit = () => `at most ${DATA.most.toLocaleString("en")} are drawn at once.`;

function openAs(name) {
  const many = name === "every" ? amount(DATA.root) : 0;
  if (many > DATA.most) {
    say(`All layers are ${counted(many, "part")}; ${limit()} Open some of the layers, or search for a part.`);
    return;
  }
  base = name;
  steady(middle(), () => { opened.clear(); for (const key of bases[name]()) opened.add(key); });
}

// Returns the part in the middle of the window.
function middle() {
  const [left, top, right, bottom] = seen(), x = (left + right) / 2, y = (top + bottom) / 2;
  let p = root;
  for (let inner = p; inner; inner = p.inner.find((q) => q.x <= x && x <= q.x + q.width && q.y <= y && y <= q.bottom)) p = inner;
  return p;
}

// Changes the open parts by a function, but keeps the part `before` (or its container) in place: its top, and its axis (or
// with `left` its left side), shifted as far as needed for the window's x `pointer` to be within it.
function steady(before, change, pointer = null, left = false) {
  change();
  draw();
  while (!spots.has(before.shape.key)) before = before.above;
  const after = spots.get(before.shape.key);
  let dx = left ? before.x - after.x : before.axis - after.axis;
  if (pointer !== null) {
    const x = (pointer - at.x) / at.k, inset = Math.min(12, after.width / 2);
    dx = Math.min(x - inset - after.x, Math.max(x + inset - after.x - after.width, dx));
  }
  at.x += dx * at.k;
  at.y += (before.y - after.y) * at.k;
  apply();
  keep();
}

// Opens or closes a part, and the corresponding part of the other model.
function flip(key) {
  const on = !opened.has(key);
  for (const one of [key, twin(key)]) if (one) opened[on ? "add" : "delete"](one);
}

function toggle(key, pointer = null) {
  const p = spots.get(key);
  if (p?.shape.box) steady(p, () => flip(key), pointer);
}

// Switches a repeat between all rounds and the first only; opens it if it is closed.
function unroll(key, pointer = null) {
  const p = spots.get(key), all = key + Z.ALL;
  if (!p?.shape.repeat) return;
  const count = p.shape.repeat.count;
  if (!opened.has(all) && count > DATA.most) return say(`These are ${counted(count, "part")}; ${limit()}`);
  steady(p, () => { if (p.open) flip(all); else { opened.add(key); opened.add(all); } }, pointer, p.open);
}

view.addEventListener("click", (e) => {
  const g = e.target.closest("g.part");
  if (!g || dragged) return;
  const key = current = g.dataset.key, p = spots.get(key), x = e.clientX - picture.getBoundingClientRect().left;
  if (e.target.closest(".times")) unroll(key, x);
  else if (p.shape.box && (!p.open || e.target.closest(".bar, .title, .opens, .mark"))) toggle(key, x);
  choose(key);
  pan(Math.min(0, picture.clientWidth - 40 - x), 0); // moves the part out from under the panel
  focusCurrent();
});

for (const name of ["none", "parts", "every"]) $(name).onclick = () => openAs(name);
$("every").hidden = !/"repeat":/.test($("data").textContent);
