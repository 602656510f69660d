// The tab of a live page: a text, the next token, and views of the run.
const sampling = { temperature: 0, top_k: 0, top_p: 1, min_p: 0 };
const SLIDERS = [["temperature", "Temperature", 0, 2, 0.05], ["top_k", "Top-k", 0, 100, 1], ["top_p", "Top-p", 0.05, 1, 0.05]];
const LISTED = 12; // tokens in the list

const typing = LIVE && el("textarea", { id: "text", rows: 3, "aria-label": "Text", spellcheck: "false", oninput: () => { live.text = typing.value; live.ids = live.token = null; ask(); } });
const holder = LIVE && el("div", { id: "views" });
const liveViews = new Map(); // name -> function that returns the elements of a view
let liveView = "next", writingText = false;

const isDecoder = () => live.facts?.kind === "decoder";
const chosenToken = () => Math.min(live.token ?? Infinity, live.run.tokens.length - 1);

if (LIVE) {
  typing.value = live.text;
  viewers.add(showLive);
  tab("live", "Live", () => { queueMicrotask(showLive); return [typing, holder]; }, true);
}

function showLive() {
  if (open.tab !== "live") return;
  const buttons = el("div", { class: "group", role: "group", "aria-label": "Views" }, [...liveViews].filter(([, { has }]) => has()).map(([name, { title }]) =>
    el("button", { "aria-pressed": name === liveView, onclick: () => { liveView = name; showLive(); } }, title)));
  const ready = live.run && !live.error && live.run.tokens.length;
  holder.replaceChildren(...[el("p", { role: "status", id: "state" }, stateOf()), ...(ready ? [chipsOf(), buttons, ...liveViews.get(liveView).make()] : [])].flat().filter(Boolean));
}

function stateOf() {
  if (live.error) return `Error: ${live.error}`;
  if (!live.facts) return `Loading the model … ${live.progress}`;
  if (!live.run?.tokens.length) return "Type a text.";
  const changed = live.scales.size ? `; ${counted(live.scales.size, "part")} changed` : "";
  return `${counted(live.run.tokens.length, "token")}, ${(live.run.seconds * 1000).toFixed(0)} ms, ${counted(live.facts.threads, "thread")}${changed}`;
}

// The tokens of the text, coloured by the probability that the model gave them; a click chooses a token.
function chipsOf() {
  const { tokens, outputs, ids } = live.run, now = chosenToken();
  const given = isDecoder() && outputs.logits ? ids.map((id, i) => (i ? chances(rowOf(outputs.logits, i - 1))[id] : null)) : ids.map(() => null);
  return el("div", { class: "tokens", role: "group", "aria-label": "Tokens of the text" }, PROMPT.tokens.map((token, i) => el("button", {
    class: i === now ? "now" : "", "aria-pressed": i === now, title: `token ${i}, id ${ids[i]}` + (given[i] === null ? "" : `; expected with ${(100 * given[i]).toFixed(1)} %`),
    style: `--w:${given[i] === null ? 0 : (65 * Math.sqrt(given[i])).toFixed(0)}%`, onclick: () => { live.token = look.token = i; ask(); } }, spelled(token))));
}

// -- the next token
// Returns [id, probability, whether it can be drawn] of the likeliest tokens, by the settings of sampling.
function drawable(logits) {
  const all = chances(logits, sampling.temperature || 1), best = likeliest(all, Math.max(LISTED, sampling.top_k, 200));
  let sum = 0;
  return best.map(([id, p], i) => {
    const can = sampling.temperature === 0 ? i === 0 : (!sampling.top_k || i < sampling.top_k) && sum < sampling.top_p;
    sum += p;
    return [id, p, can];
  });
}

function draw1(logits) {
  const can = drawable(logits).filter(([, , may]) => may), sum = can.reduce((s, [, p]) => s + p, 0);
  let rest = Math.random() * sum;
  return (can.find(([, p]) => (rest -= p) < 0) ?? can[0])[0];
}

async function append(id) {
  live.ids = [...live.run.ids, id];
  live.token = null;
  await ask();
  live.text = typing.value = live.run.tokens.join("");
}

async function writeOn() {
  writingText = !writingText;
  showLive();
  while (writingText && live.run.tokens.length < live.facts.context) {
    const id = draw1(rowOf(live.run.outputs.logits, live.run.ids.length - 1));
    if (live.facts.stops.includes(id)) break;
    await append(id);
  }
  writingText = false;
  showLive();
}

liveViews.set("next", { title: "Next token", has: () => true, make: () => {
  const { outputs, ids } = live.run, at = chosenToken(), logits = outputs.logits;
  if (!logits) return [el("p", {}, "This model returns a vector per token, no predictions.")];
  const row = logits.dims.length > 2 ? rowOf(logits, at) : rowOf(logits, 0);
  const list = drawable(row).slice(0, LISTED), before = live.scales.size ? chances(rowOf(live.plain.outputs.logits, logits.dims.length > 2 ? at : 0), sampling.temperature || 1) : null;
  const sliders = SLIDERS.map(([name, title, min, max, step]) => {
    const shown = el("output", {}, valueOf(name));
    return el("label", { class: "slider" }, title, " ", el("input", { type: "range", min, max, step, value: sampling[name], "aria-label": title, oninput: (e) => { sampling[name] = +e.target.value; showList(); shown.textContent = valueOf(name); } }), shown);
  });
  const table = el("tbody", {}), showList = () => table.replaceChildren(...drawable(row).slice(0, LISTED).map(([id, p, can]) => el("tr", { class: can ? "" : "out" },
    el("th", { scope: "row" }, el("code", {}, spelled(wordOf(id)) || `[${id}]`)), el("td", { class: "bar" }, el("span", { style: `width:${(100 * p).toFixed(1)}%` })),
    el("td", {}, `${(100 * p).toFixed(1)} %`), before && el("td", {}, `${(100 * before[id]).toFixed(1)} %`))));
  showList();
  const after = isDecoder() ? `What comes after "${spelled(PROMPT.tokens[at])}"` : `What is expected at "${spelled(PROMPT.tokens[at])}"`;
  return [head(after), isDecoder() && el("div", { class: "choices" }, sliders), el("table", { class: "likely" }, before && el("thead", {}, el("tr", {}, ["token", "", "now", "unchanged"].map((name) => el("th", { scope: "col" }, name)))), table),
    isDecoder() && el("div", { class: "choices" }, el("button", { id: "step", onclick: () => append(draw1(rowOf(logits, ids.length - 1))) }, "Write a token"), el("button", { id: "write", onclick: writeOn }, writingText ? "Stop" : "Write on")),
    isDecoder() && el("p", {}, el("small", {}, sampling.temperature === 0 ? "Temperature 0 always takes the likeliest token." : "A temperature below 1 favours likely tokens, above 1 unlikely ones. Top-k keeps the k likeliest, top-p as few as reach that probability together."))].filter(Boolean);
} });

const valueOf = (name) => (name === "top_k" && !sampling.top_k ? "all" : String(sampling[name]));

liveViews.set("attention", { title: "Attention", has: () => PROMPT?.layers.length > 0, make: () => {
  look.token = chosenToken();
  look.layer = Math.min(look.layer, PROMPT.layers.length - 1);
  return attentionOf();
} });
