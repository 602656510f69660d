// Index of all parts by key, including folded layers, and of the parts that produce values.
let parts = null; // key -> { shape, above: keys of the parts to open to make it visible }
const makers = new Map(); // value -> { key, type }
const firsts = new Map(); // key of the first round of a repeat, a part when all rounds are drawn -> key of the repeat

function index() {
  if (parts) return parts;
  parts = new Map();
  const add = (shape, above) => {
    parts.set(shape.key, { shape, above });
    for (const v of shape.ops ?? []) for (const [name, type] of v.makes) makers.set(name, { key: shape.key, type });
  };
  const walk = (shape, above) => {
    add(shape, above);
    const inside = [...above, shape.key];
    if (!shape.repeat) { shape.inner?.forEach((inner) => walk(inner, inside)); return; }
    unrolled(shape).inner.forEach((time, i) => {
      const all = [...inside, shape.key + Z.ALL];
      add(time, all);
      if (!i) firsts.set(time.key, shape.key);
      time.inner.forEach((inner) => walk(inner, [...(i ? all : inside), time.key]));
    });
  };
  walk(DATA.root, []);
  return parts;
}

const shapeAt = (key) => spots.get(key)?.shape ?? index().get(key)?.shape;
const madeBy = (value) => (index(), makers.get(value));

// Opens the containers of a part, centres and chooses it. Returns whether the part exists.
function go(key) {
  const found = index().get(key);
  if (!found) return false;
  const missing = found.above.filter((above) => !opened.has(above) && (!firsts.has(above) || opened.has(firsts.get(above) + Z.ALL)));
  missing.forEach((above) => opened.add(above));
  if (missing.length) draw();
  if (!spots.has(key)) return false;
  current = key;
  choose(key);
  centre(spots.get(key));
  mark();
  return true;
}
