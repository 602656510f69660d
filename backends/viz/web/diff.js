// Pages of a comparison: what changed in numbers; of passes, one step at a time, before and after it.
const D = DATA.difference; // { counts, operations, parameters, weights } of two models side by side
const SIGNED = ["removed", "new", "changed"];
const now = { step: 0, side: 1 }; // on a page of passes; side 0: before the pass, 1: after it

// A number before and after, and how they differ.
function delta(name, [was, is], show = (n) => n.toLocaleString("en")) {
  const by = BigInt(is) - BigInt(was), moved = by !== 0n;
  return el("div", { class: moved ? "delta moved" : "delta" }, el("dt", {}, name),
    el("dd", { title: moved ? `${exactly(was)} → ${exactly(is)}` : exactly(is) }, ...(moved ? [`${show(was)} → ${show(is)} `, el("b", {}, by > 0n ? `+${show(by)}` : `−${show(-by)}`)] : [show(is)])));
}
const exactly = (n) => n.toLocaleString("en");

function deltas({ operations, parameters, weights }, sides) {
  const [was, is] = sides.map((shape) => numbersOf(shape)), of = (name) => [was[name], is[name]];
  const kept = (name, text) => (was[name] || is[name] ? [delta(text, of(name), toldBytes)] : []);
  return el("dl", { class: "deltas", "aria-label": "Before and after" }, delta("operations", operations), delta("parameters", parameters),
    delta(`FLOPs of ${counted(scale.tokens, "token")}`, of("flops"), told), ...kept("cache", `KV cache of ${counted(scale.tokens, "token")}`),
    ...kept("state", "state of a text"), delta("weights", weights.map(BigInt), toldBytes));
}

const countsOf = (counts) => SIGNED.filter((sign) => counts[sign]).map((sign) => `${counts[sign].toLocaleString("en")} ${sign}`).join(", ") || "nothing changed";
const bar = el("section", { id: "difference", "aria-label": P ? "Passes" : "Difference", hidden: !P && !D });
document.querySelector("main").before(bar);

// -- two models
function tellDifference() {
  bar.replaceChildren(el("p", { class: "counts" }, el("b", {}, `${countsOf(D.counts)}`), ` of ${counted(D.operations[0], "operation")}`), deltas(D, DATA.root.inner));
}

// The model that a part is of.
const wholeOf = (shape) => (D ? DATA.root.inner.find(({ key }) => `${shape.key}.`.startsWith(`${key}.`)) : null) ?? DATA.root;

// The key of the same part on the other side, where there is one.
function twin(key) {
  const [side, ...rest] = key.split("."), other = [side === "before" ? "after" : "before", ...rest].join(".");
  return D && rest.length && index().has(other.replace(Z.ALL, "")) ? other : null;
}

// -- passes
const slider = el("input", { type: "range", id: "step", min: 1, "aria-label": "Pass" }), which = el("select", { id: "pass", "aria-label": "Pass" });
const [back, forth] = [["before", "‹", "Pass before ([)", -1], ["after", "›", "Pass after (])", 1]].map(([id, text, title, by]) =>
  el("button", { id: `step-${id}`, class: "icon", title, "aria-label": title, onclick: () => step(now.step + by) }, text));
const sides = ["Before", "After"].map((text, i) => el("button", { title: `The graph ${text.toLowerCase()} the pass (b)`, onclick: () => turn(i) }, text));
const passTold = el("div", { id: "pass-told", "aria-live": "polite" });

function step(to) {
  if (!P.steps[to]) return;
  showStep({ step: to });
}
const turn = (side) => showStep({ side });

function showStep(changed) {
  Object.assign(now, changed);
  const { views } = P.steps[now.step];
  setView(views[now.side]);
  apply();
  if (open.tab === "part") { if (shapeAt(chosen)) choose(chosen); else closePanel(); }
  if (field.value) search();
  tellStep();
  keep();
}

function tellStep() {
  const s = P.steps[now.step];
  slider.value = which.value = now.step + 1;
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
  bar.querySelector(".told")?.remove();
  bar.append(el("div", { class: "told" }, passTold, deltas(s, s.views.map(rootOf)), ...trace));
}

function certificate({ shown, difference, effect }) {
  if (!shown) return `declared ${effect}; --verify shows it`;
  return `shown: ${shown}${difference === null ? "" : ` Largest relative difference: ${difference ? difference.toExponential(1) : "0"}.`}`;
}

if (D) {
  tellDifference();
  $("scale").addEventListener("change", tellDifference);
  keepers.push({ write() {}, read: tellDifference });
}
if (P) {
  slider.max = P.steps.length;
  slider.oninput = () => step(slider.value - 1);
  P.steps.forEach((s, i) => which.append(el("option", { value: i + 1 }, `${i + 1}. ${s.text}${s.idle ? " (changed nothing)" : ""}`)));
  which.onchange = () => step(which.value - 1);
  bar.append(el("div", { class: "steps" }, back, slider, forth, el("span", {}, `of ${counted(P.steps.length, "pass", "passes")}`), which,
    el("div", { class: "group", role: "group", "aria-label": "Before or after the pass" }, ...sides)));
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

// -- what changed of the chosen part
section(15, (shape) => shape.ops?.filter((v) => v.mark && v.mark.sign !== "kept").map((v) => [
  el("h3", { class: `sign ${v.mark.sign}` }, `${v.mark.sign}: ${v.op}`),
  ...(v.mark.changes ? [el("dl", { class: "changes" }, v.mark.changes.flatMap(([what, was, is]) => [el("dt", {}, what),
    el("dd", {}, el("del", {}, el("small", {}, "was "), ...recipeOrText(was)), el("ins", {}, el("small", {}, "is "), ...recipeOrText(is)))]))] : []),
  ...(D && v.mark.other && index().get(v.mark.other) ? [el("p", {}, link(v.mark.other, `the same on the other side: ${v.mark.other}`))] : [])]).flat());

const recipeOrText = (text) => (text.length > 60 ? [recipeOf(text)] : [el("code", {}, text)]);
