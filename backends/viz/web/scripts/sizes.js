// The page about sizes: a treemap of parts by a cost; a click shows the part in the picture.
const MEASURES = {
  parameters: ["parameters", (n) => n.parameters, told], flops: ["FLOPs", (n) => n.flops, told], bytes: ["bytes read", (n) => n.read, toldBytes],
  step: ["bytes for one token", (n) => n.step_read, toldBytes], cache: ["cache", (n) => n.cache, toldBytes],
};
let measure = "parameters";

if (DATA.panels) tab("sizes", "Sizes", () => {
  const [, of, told] = MEASURES[measure], whole = Number(of(numbersOf(DATA.root)));
  const there = Object.keys(MEASURES).filter((name) => Number(MEASURES[name][1](numbersOf(DATA.root))));
  const pick = el("div", { class: "group", role: "group", "aria-label": "What areas show" }, there.map((name) =>
    el("button", { "aria-pressed": name === measure, onclick: () => { measure = name; refresh(); } }, MEASURES[name][0])));
  if (!whole) return [el("p", {}, "The cost of this model's operations is not known.")];
  const leaves = pieces(DATA.root, 1, of).sort((a, b) => b.size - a.size), width = tabRoom(), height = 380;
  const svg = shapeOf("svg", { class: "treemap", width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${MEASURES[measure][0]} by part` });
  for (const { leaf, x, y, w, h } of tiles(leaves.filter((l) => l.size / whole > 2e-4), 0, 0, width, height)) svg.append(tile(leaf, x, y, w, h, `${told(leaf.size)} · ${share(leaf.size, whole)}`));
  return [pick, el("p", {}, `${told(whole)} ${MEASURES[measure][0]} in all`, measure === "parameters" ? "" : `, for ${counted(scale.tokens, "token")} in ${scale.dtype}`, "."), el("figure", {}, svg),
    asTable(`${MEASURES[measure][0]} by part`, ["part", "times", MEASURES[measure][0], "share"], leaves.map((l) => [link(l.shape.key, l.name), l.times, told(l.size), share(l.size, whole)]))];
}, true);

// The parts of the treemap: the parts of layers, each summed over all rounds.
function pieces(shape, times, of) {
  const opens = shape === DATA.root || shape.repeat || (shape.inner && /^\d+$/.test(last(shape.key))) || shape.inner?.some((i) => i.repeat);
  if (!opens) return [{ shape, name: shape.title && shape.title !== last(shape.key) ? `${shape.title}, ${last(shape.key)}` : last(shape.key) || shape.title, times, kind: shape.kind, size: Number(of(numbersOf(shape))) * times }].filter((l) => l.size > 0);
  return shape.inner.flatMap((inner) => pieces(inner, times * (shape.repeat?.count ?? 1), of));
}

// A squarified treemap (Bruls 2000): areas in proportion, nearly square.
function tiles(leaves, x, y, w, h, made = []) {
  if (!leaves.length) return made;
  const total = leaves.reduce((s, l) => s + l.size, 0), short = Math.min(w, h);
  let row = [], worst = Infinity;
  for (const leaf of leaves) {
    const next = [...row, leaf], sum = next.reduce((s, l) => s + l.size, 0), thick = sum / total * w * h / short;
    const ratio = Math.max(...next.map((l) => { const long = l.size / sum * short; return Math.max(long / thick, thick / long); }));
    if (ratio > worst) break;
    [row, worst] = [next, ratio];
  }
  const sum = row.reduce((s, l) => s + l.size, 0), thick = sum / total * (w > h ? w : h);
  let at = 0;
  for (const leaf of row) {
    const long = leaf.size / sum * short;
    made.push(w > h ? { leaf, x, y: y + at, w: thick, h: long } : { leaf, x: x + at, y, w: long, h: thick });
    at += long;
  }
  const rest = leaves.slice(row.length);
  return w > h ? tiles(rest, x + thick, y, w - thick, h, made) : tiles(rest, x, y + thick, w, h - thick, made);
}

function tile({ shape, name, times, kind }, x, y, w, h, says) {
  const full = `${name}${times > 1 ? ` × ${times}` : ""}: ${says}`, act = () => go(shape.key);
  const g = shapeOf("g", { tabindex: 0, role: "button", "aria-label": full, "data-key": shape.key }, shapeOf("title", {}, full),
    shapeOf("rect", { x: x + 1, y: y + 1, width: Math.max(0, w - 2), height: Math.max(0, h - 2), rx: 4, style: `fill:var(--${kind});stroke:var(--${kind}-edge)` }));
  const fits = (text, px) => widthOf(text, px) <= w - 14;
  const label = [name, shape.title, last(shape.key)].find((text) => text && fits(text, 11)) ?? cut(shape.title || name, w - 14);
  if (h > 22 && w > 40) g.append(shapeOf("text", { class: "name", x: x + 7, y: y + 16 }, label));
  if (h > 38 && fits(says, 11)) g.append(shapeOf("text", { x: x + 7, y: y + 31 }, says));
  if (h > 54 && w > 40 && times > 1) g.append(shapeOf("text", { x: x + 7, y: y + 46 }, `× ${times}`));
  g.onclick = act;
  g.onkeydown = (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); act(); } };
  return g;
}

// Returns a text, cut to a width in pixels.
function cut(text, room) {
  if (widthOf(text, 11) <= room) return text;
  let short = text;
  while (short && widthOf(`${short}…`, 11) > room) short = short.slice(0, -1);
  return `${short}…`;
}
