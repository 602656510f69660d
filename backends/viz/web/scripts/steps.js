// The page of a pipeline: one pass at a time, with the graph before or after it.
const now = { step: 0, side: 1 }; // side 0: before the pass, 1: after it
const slider = el("input", { type: "range", id: "step", min: 1, "aria-label": "Pass" }), which = el("select", { id: "pass", "aria-label": "Pass" });
const [back, forth] = [["before", "‹", "Pass before ([)", -1], ["after", "›", "Pass after (])", 1]].map(([id, text, title, by]) =>
  el("button", { id: `step-${id}`, class: "icon", title, "aria-label": title, onclick: () => step(now.step + by) }, text));
const sides = ["Before", "After"].map((text, i) => el("button", { title: `The graph ${text.toLowerCase()} the pass (b)`, onclick: () => turn(i) }, text));
const passTold = el("div", { id: "pass-told", "aria-live": "polite" }), figures = el("div");

const step = (to) => P.steps[to] && showStep({ step: to });
const turn = (side) => showStep({ side });

function showStep(changed) {
  Object.assign(now, changed);
  const { views } = P.steps[now.step];
  setView(views[now.side]);
  apply();
  if (open.tab === "part" && !shapeAt(chosen)) closePanel();
  else if (open.tab) refresh();
  if (field.value) search();
  tellStep();
  keep();
}

function tellStep() {
  const s = P.steps[now.step];
  slider.value = which.value = now.step + 1;
  slider.setAttribute("aria-valuetext", `${now.step + 1}: ${s.text}`);
  back.disabled = !now.step;
  forth.disabled = now.step === P.steps.length - 1;
  sides.forEach((button, i) => button.setAttribute("aria-pressed", i === now.side));
  const given = Object.entries(s.arguments).map(([name, value]) => [el("dt", {}, name), el("dd", {}, el("code", {}, value))]).flat();
  passTold.replaceChildren(
    el("p", {}, el("span", { class: `effect ${s.effect}` }, s.effect), " ", s.about),
    ...(given.length ? [el("dl", { class: "given" }, given)] : []),
    el("p", { class: "counts" }, el("b", {}, s.idle ? "changed nothing" : countsOf(s.counts)), s.idle ? `: ${s.idle}` : "", el("span", { class: "shown" }, ` · ${certificate(s)}`)));
  const trace = s.lines.length ? [el("details", {}, el("summary", {}, `trace: ${counted(s.rewrites, "rewrite")}`),
    el("pre", {}, [...s.lines, ...(s.more ? [`… ${counted(s.more, "line")} more`] : [])].join("\n")))] : [];
  figures.replaceChildren(deltas(s, s.views.map(rootOf)), ...trace);
}

function certificate({ shown, difference, effect }) {
  if (!shown) return `declared ${effect}; --verify shows it`;
  return `shown: ${shown}${difference === null ? "" : ` Largest relative difference: ${difference ? difference.toExponential(1) : "0"}.`}`;
}

if (P) {
  slider.max = P.steps.length;
  slider.oninput = () => step(slider.value - 1);
  P.steps.forEach((s, i) => which.append(el("option", { value: i + 1 }, `${i + 1}. ${s.text}${s.idle ? " (changed nothing)" : ""}`)));
  which.onchange = () => step(which.value - 1);
  bar.append(el("div", { class: "steps" }, back, slider, forth, el("span", {}, `of ${counted(P.steps.length, "pass", "passes")}`), which,
    el("div", { class: "group", role: "group", "aria-label": "Before or after the pass" }, ...sides)), passTold, figures);
  $("scale").addEventListener("change", tellStep);
  keepers.push({
    write: (state) => { state.set("step", now.step + 1); if (!now.side) state.set("side", "before"); },
    read: (state) => showStep({ step: P.steps[state.get("step") - 1] ? state.get("step") - 1 : FIRST, side: state.get("side") === "before" ? 0 : 1 }),
  });
  Object.assign(commands, { "[": () => step(now.step - 1), "]": () => step(now.step + 1), b: () => turn(1 - now.side) });
  addEventListener("keydown", (e) => {
    if (e.defaultPrevented || e.ctrlKey || e.metaKey || e.altKey || e.target.closest?.("input, dialog, select, textarea")) return;
    if (e.key === "ArrowLeft" || e.key === "ArrowRight") { e.preventDefault(); step(now.step + (e.key === "ArrowLeft" ? -1 : 1)); }
  });
  $("keys").append(...[["[ ]", "pass before, pass after; also ← → where no part has the keyboard"], ["b", "before or after the pass"]].flatMap(([key, what]) =>
    [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)]));
}
