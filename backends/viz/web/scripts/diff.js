// Pages of a comparison: totals before and after, the two models, and the changes of the chosen part.
const D = DATA.difference; // { counts by sign, and as [before, after]: operations, parameters, weights [f32 elements, bytes of others] }
const SIGNED = ["removed", "new", "changed"];

// Returns a row with a number before and after, and the difference.
function delta(name, [was, is], show = (n) => n.toLocaleString("en")) {
  const by = BigInt(is) - BigInt(was), moved = by !== 0n;
  return el("div", { class: moved ? "delta moved" : "delta" }, el("dt", {}, name),
    el("dd", { title: moved ? `${exactly(was)} → ${exactly(is)}` : exactly(is) }, ...(moved ? [`${show(was)} → ${show(is)} `, el("b", {}, by > 0n ? `+${show(by)}` : `−${show(-by)}`)] : [show(is)])));
}
const exactly = (n) => n.toLocaleString("en");

// Bytes of weights: f32 weights count in the dtype that the reader chooses, others as stored.
const storedBytes = ([open, rest]) => BigInt(open) * BigInt(N.dtypes[scale.dtype]) + BigInt(rest);

function deltas({ operations, parameters, weights }, sides) {
  const [was, is] = sides.map((shape) => numbersOf(shape)), of = (name) => [was[name], is[name]];
  const kept = (name, text) => (was[name] || is[name] ? [delta(text, of(name), toldBytes)] : []);
  return el("dl", { class: "deltas", "aria-label": "Before and after" }, delta("operations", operations), delta("parameters", parameters),
    delta(`FLOPs of ${counted(scale.tokens, "token")}`, of("flops"), told), ...kept("cache", `KV cache of ${counted(scale.tokens, "token")}`),
    ...kept("state", "state of a text"), delta(scale.dtype === "f32" ? "weights" : `weights, f32 as ${scale.dtype}`, weights.map(storedBytes), toldBytes));
}

const countsOf = (counts) => SIGNED.filter((sign) => counts[sign]).map((sign) => `${counts[sign].toLocaleString("en")} ${sign}`).join(", ") || "nothing changed";
const bar = el("section", { id: "difference", "aria-label": P ? "Passes" : "Difference", hidden: !P && !D });
document.querySelector("main").before(bar);

// -- two models
function tellDifference() {
  bar.replaceChildren(el("p", { class: "counts" }, el("b", {}, `${countsOf(D.counts)}`), ` of ${counted(D.operations[0], "operation")}`), deltas(D, DATA.root.inner));
}

// Returns the root shape of the model that a part belongs to.
const wholeOf = (shape) => (D ? DATA.root.inner.find(({ key }) => `${shape.key}.`.startsWith(`${key}.`)) : null) ?? DATA.root;

// Returns the key of the corresponding part of the other model, if there is one.
function twin(key) {
  const [side, ...rest] = key.split("."), other = [side === "before" ? "after" : "before", ...rest].join(".");
  return D && rest.length && index().has(other.replace(Z.ALL, "")) ? other : null;
}

if (D) {
  tellDifference();
  $("scale").addEventListener("change", tellDifference);
  keepers.push({ write() {}, read: tellDifference });
}

// -- changes of the chosen part
section(15, (shape) => shape.ops?.filter((v) => v.mark).map((v) => [
  el("h3", { class: `sign ${v.mark.sign}` }, `${v.mark.sign}: ${v.op}`),
  ...(v.mark.changes ? [el("dl", { class: "changes" }, v.mark.changes.flatMap(([what, was, is]) => [el("dt", {}, what),
    el("dd", {}, el("del", {}, el("small", {}, "was "), ...recipeOrText(was)), el("ins", {}, el("small", {}, "is "), ...recipeOrText(is)))]))] : []),
  ...(D && v.mark.other && index().get(v.mark.other) ? [el("p", {}, link(v.mark.other, `the same on the other side: ${v.mark.other}`))] : [])]).flat());

const recipeOrText = (text) => (text.length > 60 ? [recipeOf(text)] : [el("code", {}, text)]);
