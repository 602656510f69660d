// The panel next to the picture: the chosen part, or a page that a tab opens.
const panel = $("panel"), body = $("about");

// Adds a section about the chosen part, ordered by `place`; `make` maps its shape to elements, or to nothing.
const sections = [];
function section(place, make) {
  sections.push({ place, make });
  sections.sort((a, b) => a.place - b.place);
}

// Adds a page of the panel with a button in the header; `make` returns its elements, `wide` makes the panel wide.
const tabs = new Map();
function tab(id, name, make, wide = false) {
  const button = el("button", { "aria-pressed": "false", onclick: () => (open.tab === id ? closePanel() : showTab(id)) }, name);
  tabs.set(id, { name, make, button, wide });
  $("tabs").append(button);
}

const open = { tab: null }; // the page shown: null (none), "part" or the id of a tab
function show(id, title, elements) {
  open.tab = id;
  for (const [name, { button }] of tabs) button.setAttribute("aria-pressed", name === id);
  panel.hidden = false;
  panel.classList.toggle("wide", !!tabs.get(id)?.wide);
  $("subject").textContent = title;
  body.replaceChildren(...elements);
  body.scrollTop = 0;
  keep();
}

// Shows a page; next to a wide panel, the picture stays centred in the remaining room.
function showTab(id) {
  const { name, make, wide } = tabs.get(id), before = picture.clientWidth;
  show(id, name, [make()].flat());
  if (wide) pan((picture.clientWidth - before) / 2, 0);
}

function choose(key) {
  chosen = key;
  const shape = shapeAt(key);
  show("part", shape.title, sections.map(({ make }) => make(shape)).flat().filter(Boolean));
  mark();
}

// Renders the panel again, after data that it depends on changed; keyboard focus is restored.
function refresh() {
  const reachable = () => [...body.querySelectorAll("a, button, input, summary, [tabindex]")];
  const scrolled = panel.scrollTop, place = reachable().indexOf(document.activeElement);
  if (open.tab === "part") choose(chosen); else showTab(open.tab);
  panel.scrollTop = scrolled;
  if (place >= 0) reachable()[place]?.focus({ preventScroll: true });
}

function closePanel() {
  const before = picture.clientWidth, wide = tabs.get(open.tab)?.wide;
  panel.hidden = true;
  open.tab = chosen = null;
  for (const { button } of tabs.values()) button.setAttribute("aria-pressed", false);
  if (wide) pan((picture.clientWidth - before) / 2, 0);
  mark();
  keep();
}
$("close").onclick = closePanel;

// -- parts of sections
const head = (text) => el("h3", {}, text);
const rows = (pairs) => el("dl", {}, pairs.flatMap(([name, ...value]) => [el("dt", {}, name), el("dd", {}, ...value)]));
function link(key, text) {
  const onclick = (e) => {
    e.preventDefault();
    if (go(key)) focusCurrent();
  };
  return el("a", { href: `#at=${encodeURIComponent(key)}`, onclick }, text);
}

// Returns the name of a value as a link to the part that produces it.
function valueLink(name) {
  const maker = madeBy(name);
  return maker ? link(maker.key, name) : name;
}

section(10, (shape) => {
  const above = (index().get(shape.key)?.above ?? []).filter((key) => key && !key.endsWith(Z.ALL) && parts.has(key) && shape.key !== key);
  return [el("p", { class: "path" }, above.flatMap((key) => [link(key, parts.get(key).shape.title), " / "]), el("code", {}, shape.key)),
    ...shape.lines.length && shape.box ? [el("p", {}, shape.lines.join(" · "))] : []];
});

section(40, (shape) => shape.inner && [head("In it"), el("ul", { class: "plain" },
  shape.inner.map(({ key, kind, title, symbol }) => el("li", {}, kindMark(kind), link(key, title || symbol), " ", el("small", {}, last(key)))))]);

section(50, (shape) => shape.ops?.filter((v) => v.op !== "input" && v.op !== "output").map((v) => [el("h3", { class: "op" }, v.op), rows([
  ...Object.entries(v.attrs).map(([name, value]) => [name, el("code", {}, value)]),
  ...v.reads.map(([role, name]) => [`reads ${role}`.trim(), valueLink(name), typed(madeBy(name)?.type)]),
  ...v.makes.map(([name, type]) => ["makes", el("span", {}, name), typed(type)])])]).flat());

section(50, (shape) => shape.ops?.filter((v) => v.op === "input" || v.op === "output").map((v) => rows([
  ...v.makes.map(([name, type]) => ["input", name, typed(type)]),
  ...v.reads.map(([, name]) => ["output", valueLink(name), typed(madeBy(name)?.type)])])));

section(60, (shape) => shape.ops?.flatMap((v) => v.weights).map(([name, dims, dtype, , recipe, packing]) =>
  [head("weight"), rows([["name", name], ["type", typed(dtype + dims)], ...(packing ? [["stored", packing]] : [])]), recipeOf(recipe)]).flat());

const typed = (type) => (type ? el("code", { class: "type" }, type) : null);
const kindMark = (kind) => shapeOf("svg", { class: "kind", viewBox: "-3 -3 16 16", width: 16, height: 16, "aria-hidden": true },
  shapeOf("rect", { x: -2.5, y: -2.5, width: 15, height: 15, rx: 3.5, style: `fill:var(--${kind});stroke:var(--${kind}-edge)` }),
  shapeOf("path", { d: DATA.kinds[kind][1], class: "mark", style: `stroke:var(--${kind}-edge)` }));

// -- recipes of weights, in lines; arguments that differ only in numbers are counted
function recipeOf(text) {
  const lines = broken(text, 0);
  const made = el("pre", {}, lines.join("\n"));
  return lines.length > 14 ? el("details", {}, el("summary", {}, `recipe of ${counted(lines.length, "line")}`), made) : made;
}

function broken(text, indent) {
  const pad = "  ".repeat(indent), start = text.search(/[([]/);
  if (text.length + 2 * indent <= 44 || start < 0) return [pad + text];
  const end = text.length - 1, inner = split(text.slice(start + 1, end));
  const lines = [];
  for (let i = 0; i < inner.length;) {
    let j = i;
    while (j < inner.length && unnumbered(inner[j]) === unnumbered(inner[i])) j++;
    const few = j - i < 5 ? inner.slice(i, j) : [inner[i], null, inner[j - 1]];
    for (const one of few) lines.push(...(one === null ? [`${pad}  … ${j - i - 2} more like these …`] : broken(one, indent + 1)));
    i = j;
  }
  return [pad + text.slice(0, start + 1), ...lines, pad + text[end]];
}

const unnumbered = (text) => text.replace(/-?[\d.]+/g, "#");

// Splits arguments at commas outside of brackets and quotes.
function split(text) {
  const found = [];
  let depth = 0, quote = "", from = 0;
  for (let i = 0; i < text.length; i++) {
    const c = text[i];
    if (quote) quote = c === quote ? "" : quote;
    else if (c === "'" || c === '"') quote = c;
    else if ("([{".includes(c)) depth++;
    else if (")]}".includes(c)) depth--;
    else if (c === "," && !depth) { found.push(text.slice(from, i).trim()); from = i + 1; }
  }
  return [...found, text.slice(from).trim()].filter(Boolean);
}

// -- the model as nested lists, for screen readers
tab("text", "Outline", () => {
  const more = ({ repeat, symbol, key, lines }) => [repeat ? `${repeat.count} times` : "", symbol ? last(key) : "", ...(key ? lines : [])];
  const item = (shape) => el("li", {}, shape.key ? link(shape.key, shape.title || shape.symbol) : shape.title, " ",
    el("small", {}, more(shape).filter(Boolean).join(" · ")), shape.inner ? el("ul", {}, shape.inner.map(item)) : null);
  return el("ul", { class: "outline" }, item(DATA.root));
});
