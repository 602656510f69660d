// The view of a live page that scales parts: heads, hidden units, experts, sublayers.
const KIND_NAMES = { heads: "Heads", neurons: "Hidden units", experts: "Experts", sublayers: "Sublayers" };
const part = { kind: "heads", place: 0 };

const partsOf = (kind) => (live.facts?.inputs ?? []).filter(({ name }) => name.startsWith(`scale.${kind}.`)).map(({ name, shape }) => ({ name: name.slice(6), count: shape[0] }));

// Sets factors of a part; all 1 means that it is as it was.
function setFactors(name, count, change) {
  const factors = live.scales.get(name) ?? new Float32Array(count).fill(1);
  change(factors);
  if (factors.every((v) => v === 1)) { live.scales.delete(name); live.means.delete(name); } else live.scales.set(name, factors);
  ask();
}

function divergence(p, q) {
  return p.reduce((sum, v, i) => sum + (v > 0 ? v * Math.log(v / Math.max(q[i], 1e-45)) : 0), 0);
}

liveViews.set("ablate", { title: "Change parts", has: () => Object.keys(KIND_NAMES).some((kind) => partsOf(kind).length), make: () => {
  const kinds = Object.keys(KIND_NAMES).filter((kind) => partsOf(kind).length);
  if (!kinds.includes(part.kind)) part.kind = kinds[0];
  const all = partsOf(part.kind), chosenPart = all[part.place = Math.min(part.place, all.length - 1)], { name, count } = chosenPart;
  const pick = (label, value, options, set) => el("label", {}, label, " ", el("select", { "aria-label": label, onchange: (e) => { set(e.target.value); showLive(); } }, options.map(([v, text]) => el("option", { value: v, selected: String(v) === String(value) }, text))));
  const factors = live.scales.get(name) ?? new Float32Array(count).fill(1), few = count <= 64;
  const row = (i) => {
    const shown = el("output", {}, factors[i].toFixed(2)), change = (v) => setFactors(name, count, (made) => { made[i] = v; });
    return el("div", { class: "factor" }, el("span", {}, count === 1 ? "the whole" : i), el("input", { type: "range", min: 0, max: 2, step: 0.05, value: factors[i], "aria-label": `Factor of ${name} ${i}`, oninput: (e) => { shown.textContent = (+e.target.value).toFixed(2); }, onchange: (e) => change(+e.target.value) }), shown,
      el("button", { onclick: () => change(factors[i] === 0 ? 1 : 0) }, factors[i] === 0 ? "restore" : "remove"));
  };
  const range = () => {
    const from = el("input", { type: "number", min: 0, max: count - 1, value: 0, "aria-label": "First unit" }), to = el("input", { type: "number", min: 0, max: count - 1, value: Math.min(count - 1, 63), "aria-label": "Last unit" }), by = el("input", { type: "number", step: 0.1, value: 0, "aria-label": "Factor" });
    return el("div", { class: "choices" }, "units", from, "to", to, "times", by, el("button", { onclick: () => setFactors(name, count, (made) => made.fill(+by.value, +from.value, +to.value + 1)) }, "Apply"));
  };
  const mean = part.kind === "experts" ? null : el("label", {}, el("input", { type: "checkbox", checked: live.means.has(name) || false, onchange: (e) => { live.means[e.target.checked ? "add" : "delete"](name); ask(); } }), " put their mean over the tokens in place of what is taken away");
  return [head("Change parts"), el("div", { class: "choices" }, pick("Parts", part.kind, kinds.map((kind) => [kind, KIND_NAMES[kind]]), (v) => { part.kind = v; part.place = 0; }),
    pick("of", part.place, all.map(({ name }, i) => [i, name.slice(part.kind.length + 1)]), (v) => { part.place = +v; }), link(partOf(name.slice(part.kind.length + 1)), "show")),
  ...(few ? [...Array(count).keys()].map(row) : [range()]), mean,
  el("div", { class: "choices" }, el("button", { onclick: () => setFactors(name, count, (made) => made.fill(0)) }, "Remove all of these"), el("button", { id: "reset", onclick: () => { live.scales.clear(); live.means.clear(); ask(); } }, "Restore everything")),
  ...(live.scales.size ? changesOf() : [])].filter(Boolean);
} });

// The changed parts, and the change of the answer.
function changesOf() {
  const logits = live.run.outputs.logits, made = [head("Changed"), el("ul", { class: "plain" }, [...live.scales].map(([name, factors]) => el("li", {}, name, " ", el("small", {}, `${[...factors].filter((v) => v !== 1).length} of ${factors.length}`))))];
  if (!logits) return made;
  const at = logits.dims.length > 2 ? chosenToken() : 0, [before, now] = [live.plain, live.run].map((run) => chances(rowOf(run.outputs.logits, at)));
  const ids = [...new Set([before, now].flatMap((p) => likeliest(p, 5).map(([id]) => id)))];
  return [...made, head("The answer"), el("table", {}, el("thead", {}, el("tr", {}, ["token", "unchanged", "now"].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ids.map((id) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, spelled(wordOf(id)) || `[${id}]`)), ...[before, now].map((p) => el("td", {}, `${(100 * p[id]).toFixed(1)} %`)))))),
  el("p", { id: "divergence" }, `Divergence (KL) of the two: ${divergence(before, now).toPrecision(3)} nats.`)];
}
if (LIVE) startLive();
