// The page about attention: the mask of each kind, a rolling cache step by step, and receptive fields.
if (DATA.panels?.attention) tab("attention", "Attention", () => {
  const { kinds, reach } = DATA.panels.attention;
  return [...kinds.flatMap((kind) => [head(kind.title), maskOf(kind), kind.rolling ? rollingOf(kind) : null].filter(Boolean)), reach ? [head("Receptive field by layer"), reachOf(reach)] : []].flat();
}, true);

function maskOf(kind) {
  const { mask } = kind, rows = mask.length, keys = mask[0].length, sink = kind.sinks ? 2 : 0;
  const sees = (r, c) => mask[r][c] === "1";
  const [svg, told] = squares({ titled: `${kind.title}: which of ${rows} tokens sees which`, rows, columns: keys + sink,
    value: (r, c) => (c < sink ? (c ? "ghost" : "kept") : sees(r, c - sink) ? "seen" : undefined),
    say: (r, c) => (c < sink ? (c ? "" : `token ${r} and the learned score`) : `token ${r} ${sees(r, c - sink) ? "sees" : "does not see"} ${kind.cross ? "source " : ""}token ${c - sink}`) });
  return el("div", { class: "masks" }, el("div", {}, svg, told), el("div", {},
    el("p", {}, el("b", {}, kind.where || kind.at), `, ${counted(kind.count, "attention")}. `, link(kind.at, "Show in the picture")),
    kind.sentences.map((text) => el("p", {}, text)),
    el("p", {}, el("small", {}, el("span", { class: "key", style: "background:var(--seen)" }), "seen ", el("span", { class: "key", style: "background:var(--unseen)" }), `not seen. Rows are tokens that look, columns those looked at${kind.sinks ? "; the first column is the learned score" : ""}${kind.scaled ? "; drawn smaller than it is" : ""}.`)),
    asTable("Tokens seen", ["token", "sees"], mask.map((row, r) => [r, runs(row) || "nothing"]))));
}

// Returns the indices of the ones in a row, as ranges.
const runs = (row) => [...row.matchAll(/1+/g)].map((m) => (m[0].length > 1 ? `${m.index}–${m.index + m[0].length - 1}` : m.index)).join(", ");

function rollingOf(kind) {
  const { held, keep, first, slots } = kind.rolling, box = el("div", { class: "slots", role: "img" }), told = el("span", {});
  const show = (step) => {
    told.textContent = `after token ${step}`;
    box.setAttribute("aria-label", `Slots after token ${step}: ${held[step].map((p) => (p < 0 ? "empty" : p)).join(", ")}`);
    box.replaceChildren(...held[step].map((p, slot) => el("span", { class: p < 0 ? "empty" : p === step ? "now" : slot < keep ? "kept" : "", title: `slot ${slot}` }, p < 0 ? "–" : p)));
  };
  const slider = el("input", { type: "range", min: 0, max: held.length - 1, value: 0, "aria-label": "Tokens so far", oninput: () => show(+slider.value) });
  show(0);
  return el("div", {}, el("p", {}, `A cache of ${slots.toLocaleString("en")} slots is enough: token p is in slot p mod ${(slots - first).toLocaleString("en")}${first ? ` of the slots behind the first ${first}, which stay` : ""}, where it replaces what no later token sees. Here with ${held[0].length} slots:`),
    box, el("div", { class: "choices" }, slider, told));
}

function reachOf({ context, steps: layers }) {
  const known = layers.filter(([, back]) => back !== null), most = Math.max(context ?? 1, ...known.map(([, back]) => back), 2);
  const all = layers.findIndex(([, back]) => back === null);
  const text = all < 0 ? `After ${counted(layers.length, "layer")} the receptive field is ${layers.at(-1)[1].toLocaleString("en")} earlier tokens.`
    : `From layer ${all} (${layers[all][2]}) on, the receptive field is the whole text.`;
  return el("div", {}, el("p", {}, text, " Each layer extends the receptive field of the layers below."),
    known.length ? chart({ titled: "Receptive field in tokens, by layer", x: { title: "layers", low: 0, high: layers.length, format: String },
      y: { title: "tokens before it", low: 0, high: most, format: (v) => v.toLocaleString("en") },
      series: [{ name: "reach", points: [[0, 0], ...layers.map(([, back], i) => [i + 1, back ?? most])] }], lines: context ? [{ y: context, name: `context ${context.toLocaleString("en")}` }] : [] }) : null);
}
