// The tour: a few steps through the model, each with its numbers and something to try. Arrow keys move between steps.
const TOUR = DATA.tour ?? [];
let stop = 0; // the index of the step

const sliderOf = (label, min, max, value, step, act) => {
  const shown = el("output", {}, value);
  return el("label", { class: "slider" }, label, " ", el("input", { type: "range", min, max, value, step, "aria-label": label, oninput: (e) => { shown.textContent = e.target.value; act(+e.target.value); } }), shown);
};

// Returns bars [name, share of the longest, text].
const bars = (list) => el("table", { class: "likely" }, el("tbody", {}, list.map(([name, part, text]) => el("tr", {},
  el("th", { scope: "row" }, name), el("td", { class: "bar" }, el("span", { style: `width:${(100 * Math.max(0, part)).toFixed(1)}%` })), el("td", {}, text)))));

// A widget of sliders and a place that they redraw; `draw` gets the values of the sliders.
function slidersFor(sliders, draw) {
  const values = sliders.map((s) => s[3]), place = el("div", {}), redrawAll = () => place.replaceChildren(...[draw(...values)].flat());
  redrawAll();
  return [el("div", { class: "choices" }, sliders.map(([label, min, max, value, step], i) => sliderOf(label, min, max, value, step, (v) => { values[i] = v; redrawAll(); }))), place];
}

const WIDGETS = {
  tokens: ({ pieces }) => (pieces.length ? [el("div", { class: "tokens" }, pieces.map(([text, id]) => el("button", { title: `id ${id}`, style: "--w:12%" }, spelled(text), el("sub", {}, id))))] : []),
  rows: ({ vocab, width }) => slidersFor([["Token id", 0, vocab - 1, Math.min(1000, vocab - 1), 1]], (id) => el("p", {}, `x is row ${id.toLocaleString("en")} of ${vocab.toLocaleString("en")}: ${width.toLocaleString("en")} numbers.`)),
  norm: ({ rms }) => slidersFor([["Times", 0.1, 10, 3, 0.1]], (by) => {
    const x = [0.6, -1.2, 0.3, 2.1, -0.4].map((v) => v * by), mean = rms ? 0 : x.reduce((a, b) => a + b) / x.length;
    const size = Math.sqrt(x.reduce((s, v) => s + (v - mean) ** 2, 0) / x.length);
    return [el("p", {}, "However large the vector is, its norm has the same size:"), bars(x.map((v, i) => [`x${i}`, Math.abs((v - mean) / size) / 2.2, `${v.toFixed(2)} → ${((v - mean) / size).toFixed(2)}`]))];
  }),
  heads: ({ heads, kv_heads, width, causal }) => slidersFor([["KV heads", 1, heads, kv_heads, 1]], (n) => {
    const fits = [...Array(heads).keys()].map((i) => i + 1).filter((k) => heads % k === 0), kv = fits.reduce((a, b) => (Math.abs(b - n) < Math.abs(a - n) ? b : a));
    const name = kv === heads ? "multi-head" : kv === 1 ? "multi-query" : "grouped-query";
    return [el("div", { class: "groups" }, [...Array(kv).keys()].map((g) => el("span", {}, [...Array(heads / kv).keys()].map(() => el("i", {})), el("b", {}, `kv ${g}`)))),
      el("p", {}, `${counted(kv, "KV head")} for ${counted(heads, "head")}: ${name}; ${toldBytes(4 * kv * width)} per token and layer in the cache (this model: ${toldBytes(4 * kv_heads * width)}).`),
      causal ? el("p", {}, el("small", {}, "The panel Attention draws which tokens see which.")) : null].filter(Boolean);
  }),
  receptive: ({ window, layers }) => slidersFor([["Layers", 1, layers, 1, 1]], (n) => el("p", {}, `${counted(n, "layer")}: a token sees, directly or not, ${(1 + n * (window - 1)).toLocaleString("en")} tokens.`)),
  angle: ({ theta, dim }) => slidersFor([["Position", 0, 200, 10, 1], ["Pair", 0, dim / 2 - 1, 0, 1]], (p, i) => {
    const speed = theta ** (-2 * i / dim), a = p * speed, c = 50, r = 40;
    return [shapeOf("svg", { class: "dial", viewBox: "0 0 100 100", width: 120, height: 120, role: "img", "aria-label": `angle ${(a * 180 / Math.PI).toFixed(0)} degrees` },
      shapeOf("circle", { cx: c, cy: c, r }), shapeOf("path", { d: `M${c} ${c}L${c + r * Math.cos(a)} ${c - r * Math.sin(a)}` })),
      el("p", {}, `Pair ${i} at position ${p} is turned by ${(a * 180 / Math.PI).toFixed(1)}°; a full turn takes ${significant(2 * Math.PI / speed)} tokens.`)];
  }),
  cache: ({ each, context }) => slidersFor([["Tokens", 1, context, Math.min(1000, context), 1]], (n) => el("p", {}, `${n.toLocaleString("en")} tokens: ${toldBytes(n * each)} of keys and values.`)),
  activation: ({ name }) => slidersFor([["x", -4, 4, 1, 0.1]], (x) => {
    const f = { relu: (v) => Math.max(0, v), relu2: (v) => Math.max(0, v) ** 2, gelu: (v) => v / (1 + Math.exp(-1.702 * v)), gelu_tanh: (v) => v / (1 + Math.exp(-1.702 * v)) }[name] ?? ((v) => v / (1 + Math.exp(-v)));
    const line = [...Array(81).keys()].map((i) => -4 + i / 10), at = (v) => [50 + 12 * v, 62 - 12 * Math.min(4.5, f(v))];
    return [shapeOf("svg", { class: "dial", viewBox: "0 0 100 100", width: 160, height: 160, role: "img", "aria-label": `curve of ${name}` },
      shapeOf("path", { class: "grid", d: "M2 62H98M50 8V92" }), shapeOf("path", { d: `M${line.map((v) => at(v).map((n) => n.toFixed(1)).join(" ")).join("L")}` }), shapeOf("circle", { class: "dot", cx: at(x)[0], cy: at(x)[1], r: 3 })),
      el("p", {}, `${name}(${x.toFixed(1)}) = ${f(x).toFixed(2)}`)];
  }),
  experts: ({ count, active }) => {
    const place = el("div", {}), roll = () => {
      const scores = [...Array(count).keys()].map((e) => [e, Math.random() * 4 - 2]).sort((a, b) => b[1] - a[1]).slice(0, Math.max(active, 6)), most = scores.slice(0, active), sum = most.reduce((s, [, v]) => s + Math.exp(v), 0);
      place.replaceChildren(bars(scores.map(([e, v], i) => [`expert ${e}`, i < active ? Math.exp(v) / sum : 0, i < active ? `${(100 * Math.exp(v) / sum).toFixed(0)} %` : "not chosen"])));
    };
    roll();
    return [el("button", { onclick: roll }, "Another token"), place];
  },
  decay: () => slidersFor([["Decay", 0.5, 0.999, 0.9, 0.001]], (d) => el("p", {}, `After 10 tokens ${(100 * d ** 10).toFixed(1)} % of a memory is left, after 100 tokens ${(100 * d ** 100).toPrecision(2)} %; half of it after ${significant(Math.log(0.5) / Math.log(d))} tokens.`)),
  temperature: () => slidersFor([["Temperature", 0.05, 2, 1, 0.05]], (t) => {
    const logits = { Paris: 4, Lyon: 2.5, the: 2, a: 1.2, France: 0.5 }, most = 4, e = Object.entries(logits).map(([name, v]) => [name, Math.exp((v - most) / t)]), sum = e.reduce((s, [, v]) => s + v, 0);
    return bars(e.map(([name, v]) => [name, v / sum, `${(100 * v / sum).toFixed(1)} %`]));
  }),
  bits: ({ bits }) => slidersFor([["Bits", 2, 8, Math.min(8, Math.max(2, bits)), 1]], (n) => {
    const w = [0.82, -0.31, 0.07, -1.0, 0.44, -0.66], top = 2 ** (n - 1) - 1, rounded = w.map((v) => Math.round(v * top) / top), error = Math.max(...w.map((v, i) => Math.abs(v - rounded[i])));
    return [bars(w.map((v, i) => [v.toFixed(2), Math.abs(rounded[i]), rounded[i].toFixed(3)])), el("p", {}, `${2 ** n} values; largest error ${error.toFixed(3)}.`)];
  }),
};

function stepOf(i) {
  const { title, paragraphs, formulas, papers, widget } = TOUR[i];
  return [el("h3", { class: "stop" }, `${i + 1}. ${title}`), ...paragraphs.map((text) => el("p", {}, text)),
    formulas.length ? el("pre", { class: "formula" }, formulas.join("\n")) : null,
    ...(WIDGETS[widget.kind]?.(widget) ?? []),
    papers.length ? el("p", {}, el("small", {}, papers.join("; "))) : null].filter(Boolean);
}

function goTo(i) {
  stop = Math.max(0, Math.min(TOUR.length - 1, i));
  showTab("tour");
  const { at } = TOUR[stop];
  if (at && index().has(at)) { showStop(at); }
}

// Marks a part and brings it into view, without its panel.
function showStop(key) {
  const { above } = index().get(key);
  const missing = above.filter((one) => !opened.has(one) && (!firsts.has(one) || opened.has(firsts.get(one) + Z.ALL)));
  missing.forEach((one) => opened.add(one));
  if (missing.length) draw();
  if (!spots.has(key)) return;
  chosen = key;
  centre(spots.get(key));
  mark();
}

function printTour() {
  body.replaceChildren(...TOUR.flatMap((_, i) => stepOf(i)));
  document.body.classList.add("handout");
  addEventListener("afterprint", () => { document.body.classList.remove("handout"); showTab("tour"); }, { once: true });
  print();
}

if (TOUR.length) {
  tab("tour", "Tour", () => [
    el("nav", { class: "choices", "aria-label": "Steps" }, el("button", { id: "back", disabled: stop === 0, onclick: () => goTo(stop - 1) }, "← Back"),
      el("span", {}, `${stop + 1} of ${TOUR.length}`), el("button", { id: "on", disabled: stop === TOUR.length - 1, onclick: () => goTo(stop + 1) }, "On →"), el("button", { onclick: printTour }, "Print")),
    ...stepOf(stop)], true);
  addEventListener("keydown", (e) => {
    if (open.tab !== "tour" || e.ctrlKey || e.metaKey || e.altKey || e.target.closest?.("input, select, textarea, #picture")) return;
    if (e.key === "ArrowRight") goTo(stop + 1); else if (e.key === "ArrowLeft") goTo(stop - 1); else return;
    e.preventDefault();
  });
}
