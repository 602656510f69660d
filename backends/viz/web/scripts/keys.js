// Keyboard navigation from part to part, in order of computation.
const KEYS = [
  ["/", "search; Enter: next match, Shift Enter: the one before"], ["Enter, Space", "open or close a part, show what is known of it"], ["↑ ↓", "part before, part after"],
  ["→", "open; then into it"], ["←", "close; then out of it"], ["Home, End", "first part, last part"], ["u", "all layers of a repeat, or one for all"],
  ["e", "open all parts"], ["c", "close all parts"], ["+ −", "zoom"], ["0", "the whole picture"], ["1", "as large as at first"],
  ["d", "light or dark"], ["Esc", "close the panel, clear the search"], ["?", "these keys"],
];
$("keys").append(...KEYS.flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)]));

// Moves keyboard focus to the current part, which is always drawn, even outside of the window.
function focusCurrent(move = false) {
  const p = spots.get(current);
  if (!p) return;
  if (move) reveal(p);
  if (!elements.has(p)) paint();
  elements.get(p)?.focus({ preventScroll: true });
}

function walkTo(p) {
  if (!p || p === root) return;
  current = p.shape.key;
  paint();
  focusCurrent(true);
}

// Returns the visible part after p, or before it.
function after(p, within = true) {
  if (within && p.open && p.inner.length) return p.inner[0];
  return !p.above ? null : p.above.inner[p.place + 1] ?? after(p.above, false);
}
function lastIn(p) { return p.open && p.inner.length ? lastIn(p.inner.at(-1)) : p; }
const before = (p) => (p.place ? lastIn(p.above.inner[p.place - 1]) : p.above);

const walks = {
  ArrowDown: after, ArrowUp: before, Home: () => root.inner[0], End: () => lastIn(root),
  ArrowRight: (p) => (p.open ? p.inner[0] : p.shape.box && (toggle(p.shape.key), null)),
  ArrowLeft: (p) => (p.open ? (toggle(p.shape.key), null) : p.above),
};
picture.addEventListener("keydown", (e) => {
  const p = spots.get(e.target.closest("g.part")?.dataset.key);
  if (!p || e.ctrlKey || e.metaKey || e.altKey) return;
  if (walks[e.key]) walkTo(walks[e.key](p));
  else if (e.key === "Enter" || e.key === " ") { toggle(p.shape.key); choose(p.shape.key); }
  else if (e.key === "u") unroll(p.shape.key);
  else return;
  e.preventDefault();
  focusCurrent(true);
});

const commands = {
  "/": () => field.select(), "?": () => $("help").showModal(), "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8),
  0: fit, 1: home, d: () => setTheme(!dark()), e: () => openAs("parts"), c: () => openAs("none"),
  Escape: () => { if (open.tab) closePanel(); else if (matches.size) clearSearch(); },
};
addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || e.target.closest?.("input, dialog, select, textarea") || !commands[e.key]) return;
  e.preventDefault();
  commands[e.key]();
});
$("ask").onclick = () => $("help").showModal();
