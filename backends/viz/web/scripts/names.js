// Every part by its key, those of folded layers among them, and the parts that make values.
let parts = null; // key -> { shape, above: keys to open for it to be seen }
const makers = new Map(); // value -> { key, type }
const firsts = new Map(); // the first time of a repeat, which is a part when all times are shown -> the repeat

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

// Opens what is needed to see a part, puts it in the middle, and chooses it. Says whether there is such a part.
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
