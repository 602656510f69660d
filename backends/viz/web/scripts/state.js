// Theme, state in the URL, printing, the legend, and start of the page.
const dark = () => document.documentElement.classList.contains("dark");
const night = matchMedia("(prefers-color-scheme: dark)");
let theme = ""; // the chosen theme; "": that of the system

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

// -- state in the URL: open parts (a base and differences from it), theme, page of the panel
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
    if (spots.has(chosen)) state.set("at", chosen); // restoring an invisible part would open its containers
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
  theme = state.get("theme") ?? DATA.theme ?? remembered(); // a page in a frame has no URL: the gallery passes the theme
  paintTheme(theme ? theme === "dark" : night.matches);
  draw();
  home();
  for (const more of keepers) more.read(state);
  if (state.get("at") && !go(state.get("at"))) say(`There is no part called ${state.get("at")} in this model.`);
  const tabNow = state.get("tab") ?? (location.hash ? null : DATA.tab);
  if (tabs.has(tabNow)) showTab(tabNow);
}
addEventListener("hashchange", () => { if (location.hash !== written) restore(); });

// -- printing: the whole picture in the light theme
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

// -- the legend: kinds in the picture; parts of the kind under the pointer are highlighted
const kinds = new Set(), gather = (shape) => { if (shape.key) kinds.add(shape.kind); shape.inner?.forEach(gather); };
gather(DATA.root);
for (const [kind, [name]] of Object.entries(DATA.kinds)) {
  if (!kinds.has(kind) && !P) continue; // pages of pipelines list the signs of all steps
  const alone = (on) => { $("alone").textContent = on ? `#view g.part:not([data-kind="${kind}"]), #view path.wire { opacity: .18 }` : ""; };
  const on = () => alone(true), off = () => alone(false);
  $("legend").append(el("button", { class: "kind", onpointerenter: on, onpointerleave: off, onfocus: on, onblur: off }, kindMark(kind), name));
}

$("totals").textContent = DATA.totals ?? "";
$("totals").hidden = !DATA.totals;
restore();
