// Several pictures in one page: equal shapes are stored once in a pool, by index.
const P = DATA.passes; // on the page of a pipeline: { pool, views: [index of the root, keys open at first], steps }
const pictures = new Map(); // index of a view -> its root

function shapeFrom(place) {
  const shape = { ...P.pool[place] };
  if (shape.inner) shape.inner = shape.inner.map(shapeFrom);
  if (shape.repeat?.once.inner) shape.repeat = { ...shape.repeat, once: { ...shape.repeat.once, inner: shape.repeat.once.inner.map(shapeFrom) } };
  return shape;
}

function rootOf(view) {
  if (!pictures.has(view)) pictures.set(view, shapeFrom(P.views[view][0]));
  return pictures.get(view);
}

// Parts that the reader opened or closed: key -> whether it is open.
const touched = new Map();

// Switches to another view; parts that the reader opened or closed stay so if they exist in it.
function setView(view) {
  const basis = new Set(bases[base]());
  for (const key of new Set([...basis, ...opened])) if (basis.has(key) !== opened.has(key)) touched.set(key, opened.has(key));
  for (const key of touched.keys()) if (index().has(key.replace(Z.ALL, ""))) touched.set(key, opened.has(key));
  useView(view);
  forget();
  opened.clear();
  for (const key of bases[base]()) opened.add(key);
  for (const [key, on] of touched) opened[on ? "add" : "delete"](key);
  draw();
}

function useView(view) {
  DATA.root = rootOf(view);
  DATA.opened = P.views[view][1];
}

// Clears the indexes of the previous picture.
function forget() {
  parts = texts = null;
  makers.clear();
  firsts.clear();
  drawnMap = null;
}

const FIRST = P ? Math.max(0, P.steps.findIndex((s) => !s.idle)) : 0; // the first step that changed something
if (P) {
  useView(P.steps[FIRST].views[1]);
  for (const key of DATA.opened) opened.add(key);
}
