// The page about a prompt: attention weights of every head, and predicted next tokens.
let PROMPT = DATA.prompt; // on a live page, the newest run of the model
const look = { layer: 0, head: -1, token: 0 }; // head −1: the mean of all, −2: the roll-out up to the layer

// Returns the attention weights of a head, or their mean over heads, as a function of query and key.
function weightsOf(layer) {
  const n = PROMPT.tokens.length, each = layer.causal ? n * (n + 1) / 2 : n * n;
  if (!layer.data) layer.bytes ??= Uint8Array.from(atob(layer.weights), (c) => c.charCodeAt(0));
  const of = layer.data ? (head, q, k) => layer.data[(head * n + q) * n + k]
    : (head, q, k) => (layer.causal && k > q ? 0 : layer.bytes[head * each + (layer.causal ? q * (q + 1) / 2 : q * n) + k] / 255);
  return (head, q, k) => {
    if (head === -2) return rollout(layer)[q * n + k];
    if (head >= 0) return of(head, q, k);
    let sum = 0;
    for (let h = 0; h < layer.heads; h++) sum += of(h, q, k);
    return sum / layer.heads;
  };
}

// Returns the attention roll-out after a layer (Abnar 2020): products of the mean weights of all layers so far, half of
// each replaced by the token itself, as the residual stream keeps it.
function rollout(layer) {
  if (layer.rolled) return layer.rolled;
  const n = PROMPT.tokens.length, place = PROMPT.layers.indexOf(layer), below = place ? rollout(PROMPT.layers[place - 1]) : null;
  const at = weightsOf(layer), mixed = new Float64Array(n * n), made = below ? new Float64Array(n * n) : mixed;
  for (let q = 0; q < n; q++) {
    let sum = 0;
    for (let k = 0; k < n; k++) sum += mixed[q * n + k] = (at(-1, q, k) + (q === k)) / 2;
    for (let k = 0; k < n; k++) mixed[q * n + k] /= sum;
  }
  if (below) for (let q = 0; q < n; q++) for (let j = 0; j < n; j++) for (let k = 0; k < n; k++) made[q * n + k] += mixed[q * n + j] * below[j * n + k];
  return layer.rolled = made;
}

const spelled = (token) => token.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
const headName = () => (look.head === -2 ? "roll-out of the layers up to it" : look.head < 0 ? "mean of all heads" : `head ${look.head}`);

if (PROMPT) tab("prompt", "Prompt", () => {
  look.token = Math.min(look.token, PROMPT.tokens.length - 1);
  return [...(PROMPT.layers.length ? attentionOf() : []), ...(PROMPT.next.length ? expected() : []), ...(PROMPT.experts.length ? loads() : [])];
}, true);

function attentionOf() {
  const layer = PROMPT.layers[look.layer], at = weightsOf(layer), n = PROMPT.tokens.length;
  const slider = el("input", { type: "range", min: 0, max: PROMPT.layers.length - 1, value: look.layer, "aria-label": "Layer", onchange: () => { look.layer = +slider.value; look.head = Math.min(look.head, PROMPT.layers[look.layer].heads - 1); refresh(); } });
  const heads = [-2, -1, ...Array(layer.heads).keys()].map((h) => {
    const small = el("canvas", { width: n, height: n });
    paintHead(small.getContext("2d"), at, h, n);
    return el("button", { "aria-pressed": h === look.head, title: h === -2 ? "roll-out: where information came from, through all layers so far" : h < 0 ? "mean of all heads" : `head ${h}`, onclick: () => { look.head = h; refresh(); } }, small, el("span", {}, h === -2 ? "roll-out" : h < 0 ? "mean" : h));
  });
  return [head("What a token looks at"), el("div", { class: "choices" }, slider, el("span", {}, `${layer.where}, ${headName()}`), link(layer.at, "show")), el("div", { class: "heads", role: "group", "aria-label": "Heads" }, heads),
    tokensOf(at), heatOf(at, layer), el("p", {}, el("small", {}, "Computed in float64 for this prompt; attention weights are stored in steps of 1/255."))];
}

// Returns a small picture of a head: the darker, the larger the attention weight.
function paintHead(pen, at, h, n) {
  const image = pen.createImageData(n, n), ink = dark() ? 235 : 30;
  for (let q = 0; q < n; q++) for (let k = 0; k < n; k++) {
    const i = 4 * (q * n + k);
    image.data[i] = image.data[i + 1] = image.data[i + 2] = ink;
    image.data[i + 3] = 255 * Math.sqrt(at(h, q, k));
  }
  pen.putImageData(image, 0, 0);
}

// The tokens of the prompt; a click on a token shows its attention weights to the others.
function tokensOf(at) {
  const chips = PROMPT.tokens.map((token, i) => {
    const w = at(look.head, look.token, i);
    return el("button", { class: i === look.token ? "now" : "", style: `--w:${(65 * Math.sqrt(w)).toFixed(0)}%`, title: `${(100 * w).toFixed(1)} %`, "aria-pressed": i === look.token, onclick: () => { look.token = i; refresh(); } }, spelled(token));
  });
  return el("div", { class: "tokens", role: "group", "aria-label": `Tokens by attention weight from token ${look.token}` }, chips);
}

function heatOf(at, layer) {
  const n = PROMPT.tokens.length, names = PROMPT.tokens.map((t) => cut(spelled(t), 84)), left = 92, size = Math.max(4, Math.min(18, Math.floor((tabRoom() - left) / n)));
  const top = size > 11 ? 88 : 4, told = el("output", { class: "values" }, "");
  const svg = shapeOf("svg", { class: "chart heat", width: left + n * size, height: top + n * size, role: "img", "aria-label": `Attention weights of ${layer.where}, ${headName()}` });
  for (let q = 0; q < n; q++) {
    if (size > 11 || q === look.token) svg.append(shapeOf("text", { x: left - 6, y: top + q * size + size / 2 + 4, "text-anchor": "end", class: q === look.token ? "now" : "" }, names[q]));
    if (size > 11) svg.append(shapeOf("text", { transform: `translate(${left + q * size + size / 2 + 4} ${top - 6}) rotate(-90)` }, names[q]));
    for (let k = 0; k < n; k++) {
      const w = at(look.head, q, k);
      if (w >= 1 / 255) svg.append(shapeOf("rect", { x: left + k * size, y: top + q * size, width: size - 0.5, height: size - 0.5, "fill-opacity": Math.sqrt(w).toFixed(2) }));
    }
  }
  svg.append(shapeOf("rect", { class: "frame", x: left - 0.5, y: top - 0.5, width: n * size, height: n * size }));
  const place = (e) => { const box = svg.getBoundingClientRect(); return [Math.floor((e.clientY - box.top - top) / size), Math.floor((e.clientX - box.left - left) / size)]; };
  svg.addEventListener("pointermove", (e) => { const [q, k] = place(e); told.textContent = q >= 0 && k >= 0 && q < n && k < n ? `"${spelled(PROMPT.tokens[q])}" looks at "${spelled(PROMPT.tokens[k])}": ${(100 * at(look.head, q, k)).toFixed(1)} %` : ""; });
  svg.addEventListener("click", (e) => { const [q] = place(e); if (q >= 0 && q < n) { look.token = q; refresh(); } });
  const most = (q) => [...Array(n).keys()].map((k) => [k, at(look.head, q, k)]).sort((a, b) => b[1] - a[1]).slice(0, 3).filter(([, w]) => w > 0);
  return el("figure", {}, svg, told, asTable("What tokens look at most", ["token", "looks at"], PROMPT.tokens.map((t, q) => [`${q} ${spelled(t)}`, most(q).map(([k, w]) => `${spelled(PROMPT.tokens[k])} ${(100 * w).toFixed(0)} %`).join(", ")])));
}

function expected() {
  const { likely, came, rank } = PROMPT.next[look.token];
  return [head(`What is expected after "${spelled(PROMPT.tokens[look.token])}"`),
    el("table", { class: "likely" }, el("tbody", {}, likely.map(([token, p]) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, spelled(token))), el("td", { class: "bar" }, el("span", { style: `width:${(100 * p).toFixed(1)}%` })), el("td", {}, `${(100 * p).toFixed(1)} %`))))),
    came === undefined ? null : el("p", {}, `What came, "${spelled(PROMPT.tokens[look.token + 1])}", was number ${rank} at ${(100 * came).toPrecision(3)} %.`),
    asTable("Predicted next token at every position", ["after", "predicted", "actual"], PROMPT.next.map((at, i) => [`${i} ${spelled(PROMPT.tokens[i])}`, `${spelled(at.likely[0][0])} ${(100 * at.likely[0][1]).toFixed(0)} %`, at.came === undefined ? "" : `${spelled(PROMPT.tokens[i + 1])} ${(100 * at.came).toPrecision(2)} %, number ${at.rank}`]))].filter(Boolean);
}

// The number of tokens that are routed to each expert of each layer.
function loads() {
  const most = Math.max(...PROMPT.experts.flatMap((l) => l.counts)), experts = Math.max(...PROMPT.experts.map((l) => l.counts.length)), size = Math.max(3, Math.min(16, Math.floor((tabRoom() - 60) / experts)));
  const told = el("output", { class: "values" }, ""), svg = shapeOf("svg", { class: "chart heat", width: experts * size, height: PROMPT.experts.length * Math.max(size, 6), role: "img", "aria-label": "Tokens by expert and layer" }), tall = Math.max(size, 6);
  PROMPT.experts.forEach((l, r) => l.counts.forEach((n, c) => { if (n) svg.append(shapeOf("rect", { x: c * size, y: r * tall, width: size - 0.5, height: tall - 0.5, "fill-opacity": (n / most).toFixed(2) })); }));
  svg.append(shapeOf("rect", { class: "frame", x: 0.5, y: 0.5, width: experts * size - 1, height: PROMPT.experts.length * tall - 1 }));
  svg.addEventListener("pointermove", (e) => { const box = svg.getBoundingClientRect(), l = PROMPT.experts[Math.floor((e.clientY - box.top) / tall)], c = Math.floor((e.clientX - box.left) / size); told.textContent = l && c in l.counts ? `${l.where}, expert ${c}: ${counted(l.counts[c], "token")}` : ""; });
  return [head("Load of experts"), el("p", {}, "Rows are layers, columns experts; the darker, the more tokens of the prompt."), el("figure", {}, svg, told,
    asTable("Tokens by expert", ["layer", "asked", "most", "idle"], PROMPT.experts.map((l) => { const max = Math.max(...l.counts); return [link(l.at, l.where), l.counts.filter(Boolean).length, `expert ${l.counts.indexOf(max)}: ${max}`, l.counts.filter((n) => !n).length]; })))];
}
