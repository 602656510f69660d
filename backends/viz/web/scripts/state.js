// Light or dark, what the address keeps, paper, the legend; and the start.
const dark = () => document.documentElement.classList.contains("dark");
const night = matchMedia("(prefers-color-scheme: dark)");
let theme = ""; // what was asked for; nothing: as the system has it

function paintTheme(isDark) {
  document.documentElement.classList.toggle("dark", isDark);
  drawnMap = null;
  if (root) showMap();
}
function setTheme(isDark) {
  theme = isDark ? "dark" : "light";
  try { localStorage.setItem("weft-theme", theme); } catch { /* pages from a disk may not store: the address keeps it */ }
  paintTheme(isDark);
  keep();
}
function remembered() {
  try { return localStorage.getItem("weft-theme") ?? ""; } catch { return ""; }
}
$("theme").onclick = () => setTheme(!dark());
night.addEventListener("change", (e) => { if (!theme) paintTheme(e.matches); });

// -- the address: what is open (as a base and what differs from it), the theme, what the panel shows
let writing = 0, written = "";
function keep() {
  clearTimeout(writing);
  writing = setTimeout(() => {
    writing = 0;
    const state = new URLSearchParams(), basis = new Set(bases[base]());
    if (base !== "first") state.set("as", base);
    for (const key of opened) if (!basis.has(key)) state.append("open", key);
    for (const key of basis) if (!opened.has(key)) state.append("close", key);
    if (theme) state.set("theme", theme);
    if (spots.has(chosen)) state.set("at", chosen); // a part that is not to be seen would be opened
    else if (tabs.has(open.tab)) state.set("tab", open.tab);
    for (const more of keepers) more.write(state);
    written = `#${state}`;
    if (location.protocol !== "about:" && written !== (location.hash || "#")) history.replaceState(null, "", written);
  }, 150);
}

function restore() {
  const state = new URLSearchParams(location.hash.slice(1));
  base = bases[state.get("as")] && (state.get("as") !== "every" || amount(DATA.root) <= DATA.most) ? state.get("as") : "first";
  opened.clear();
  for (const key of [...bases[base](), ...state.getAll("open")]) opened.add(key);
  for (const key of state.getAll("close")) opened.delete(key);
  theme = state.get("theme") ?? DATA.theme ?? remembered(); // a page in a page has no address: what it is in says it
  paintTheme(theme ? theme === "dark" : night.matches);
  draw();
  home();
  for (const more of keepers) more.read(state);
  if (state.get("at") && !go(state.get("at"))) say(`There is no part called ${state.get("at")} in this model.`);
  if (tabs.has(state.get("tab"))) showTab(state.get("tab"));
}
addEventListener("hashchange", () => { if (location.hash !== written) restore(); });

// -- paper: the whole picture, light
addEventListener("beforeprint", () => {
  document.documentElement.classList.remove("dark");
  const kept = { ...at };
  Object.assign(at, { k: 1, x: 0, y: 0 });
  paint([0, 0, root.width, root.height]);
  onPaper = true;
  view.removeAttribute("transform");
  picture.setAttribute("viewBox", `-2 -2 ${root.width + 4} ${root.height + 4}`);
  addEventListener("afterprint", () => {
    onPaper = false;
    picture.removeAttribute("viewBox");
    Object.assign(at, kept);
    paintTheme(theme ? theme === "dark" : night.matches);
    paint();
    apply();
  }, { once: true });
});

// -- the legend: kinds that there are; one stands out while it is pointed at
const kinds = new Set(), gather = (shape) => { if (shape.key) kinds.add(shape.kind); shape.inner?.forEach(gather); };
gather(DATA.root);
for (const [kind, [name]] of Object.entries(DATA.kinds)) {
  if (!kinds.has(kind) && !P) continue; // of passes, the signs of all steps
  const alone = (on) => { $("alone").textContent = on ? `#view g.part:not([data-kind="${kind}"]), #view path.wire { opacity: .18 }` : ""; };
  const on = () => alone(true), off = () => alone(false);
  $("legend").append(el("button", { class: "kind", onpointerenter: on, onpointerleave: off, onfocus: on, onblur: off }, kindMark(kind), name));
}

restore();
