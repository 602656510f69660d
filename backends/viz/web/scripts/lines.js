// Highlights the lines of the part under the pointer, and shows the values on the line under it.
const tip = $("tip");
const REACH = 6; // maximum distance of the pointer from a line, pixels
let hot = [];

function heat(lines) {
  for (const line of hot) elements.get(line)?.classList.remove("hot");
  hot = lines;
  for (const line of hot) elements.get(line)?.classList.add("hot");
}

const linesOf = (p) => (p?.above ? p.above.wires.filter((w) => w.source === p.shape || w.target === p.shape) : []);

// Returns the line at (x, y) of the picture.
function lineAt(x, y) {
  let nearest = REACH / at.k, found = null;
  for (const line of elements.keys()) {
    for (let i = 1; i < (line.points?.length ?? 0); i++) {
      const [[x0, y0], [x1, y1]] = [line.points[i - 1], line.points[i]];
      const beside = Math.max(Math.min(x0, x1) - x, x - Math.max(x0, x1), 0), over = Math.max(Math.min(y0, y1) - y, y - Math.max(y0, y1), 0);
      if (Math.hypot(beside, over) < nearest) [nearest, found] = [Math.hypot(beside, over), line];
    }
  }
  return found;
}

function toldOf(line) {
  const named = line.values.slice(0, 6).map((name) => el("div", {}, el("b", {}, name), " ", madeBy(name)?.type ?? ""));
  return line.values.length > 6 ? [...named, el("div", {}, `and ${line.values.length - 6} more`)] : named;
}

const writtenOn = ({ title, key, lines }) => [el("b", {}, title), ...[key, ...lines].map((text) => el("div", {}, text))];

function hover(e) {
  if (fingers.size) return;
  const box = picture.getBoundingClientRect(), x = e.clientX - box.left, y = e.clientY - box.top;
  const g = e.target.closest("g.part"), p = g ? spots.get(g.dataset.key) : null;
  const line = e.target.closest(".bar") || (p && !p.open) ? null : lineAt((x - at.x) / at.k, (y - at.y) / at.k);
  heat(line ? [line] : p?.open && !e.target.closest(".bar") ? [] : linesOf(p));
  const told = line ? toldOf(line) : p && painted.detail < 2 ? writtenOn(p.shape) : [];
  tip.hidden = !told.length;
  tip.replaceChildren(...told);
  tip.style.left = `${Math.min(x + 14, Math.max(0, box.width - tip.offsetWidth - 8))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > box.height ? y - tip.offsetHeight - 8 : y + 18}px`;
}

picture.addEventListener("pointermove", hover);
picture.addEventListener("pointerleave", () => { tip.hidden = true; heat([]); });
view.addEventListener("focusin", (e) => {
  const p = spots.get(e.target.closest("g.part")?.dataset.key);
  if (!p) return;
  heat(linesOf(p));
  if (e.target.matches(":focus-visible")) reveal(p);
});
