// The model behind a live page: a worker runs it, and the newest question wins.
const LIVE = DATA.live; // { text: the first text }
const live = {
  worker: null, facts: null, progress: "", error: "", // facts: live.json, with the inputs and outputs of the model
  text: LIVE?.text ?? "", ids: null, // ids: tokens that were generated; null: those of the text
  token: null, // the chosen token; null: the last one
  run: null, plain: null, // the newest run, and one of the same text with all parts as they are
  scales: new Map(), means: new Set(), // part -> factors that are not all 1; parts that are replaced by their mean
  seen: [], // names of values of the chosen part
};
const viewers = new Set(); // functions that draw the newest run

const pending = new Map();
let asked = 0;
function send(message, worker = live.worker) {
  const id = asked++;
  worker.postMessage({ id, ...message });
  return new Promise((resolve, reject) => pending.set(id, { resolve, reject }));
}

function redraw() {
  for (const draw of viewers) draw();
}

function newWorker() {
  const worker = new Worker("./live.js", { type: "module" });
  worker.onerror = (event) => { live.error = event.message || "live.js cannot be loaded: open the page from a server"; redraw(); };
  worker.onmessage = ({ data: { id, progress, result, error } }) => {
    if (progress) {
      live.progress = `${(progress.loaded / 1e6).toFixed(0)} of ${(progress.total / 1e6).toFixed(0)} MB`;
      if (!live.facts) redraw();
      return;
    }
    const { resolve, reject } = pending.get(id);
    pending.delete(id);
    if (error) reject(Error(error)); else resolve(result);
  };
  return worker;
}

// Starts with a model that is ready at once, and goes on with one that took seconds to open and answers in half the time.
async function startLive() {
  const given = new URLSearchParams(location.search).get("threads"), threads = given ? +given : undefined;
  live.worker = newWorker();
  try {
    live.facts = await send({ load: { threads, quickly: true } });
    await ask();
    while (performance.now() - lastAsked < IDLE) await new Promise((resolve) => setTimeout(resolve, IDLE / 4));
    const fast = newWorker();
    await send({ load: { threads } }, fast);
    while (asking) await asking;
    live.worker.terminate();
    live.worker = fast;
    live.fast = true;
  } catch (error) {
    live.error = error.message;
    redraw();
  }
}

// Runs the model on the text, and without changes too if parts are scaled. A question during a run is asked after it.
const IDLE = 2000; // milliseconds without a question
let asking = null, again = false, lastAsked = 0;
function ask() {
  lastAsked = performance.now();
  if (asking) { again = true; return asking; }
  asking = (async () => {
    do {
      again = false;
      const question = { text: live.text, ids: live.ids, chosen: live.token ?? undefined, want: wanted() };
      try {
        const key = JSON.stringify([question.text, question.ids, question.chosen, question.want]);
        if (live.plain?.key !== key) live.plain = { ...(await send({ run: question })), key };
        live.run = live.scales.size ? await send({ run: { ...question, inputs: inputsOf(live.plain) } }) : live.plain;
        live.error = "";
        await learnNames(live.plain, live.run);
      } catch (error) {
        live.error = error.message;
      }
      PROMPT = promptOf(live.run);
      if (!again) redraw();
    } while (again);
    asking = null;
  })();
  return asking;
}

const wanted = () => ["logits", "last_hidden_state", "attention", "residual", "routes", "states", ...live.means, ...live.seen];

// The factors of scaled parts, and the mean over the tokens of the text of parts that are replaced by it.
function inputsOf(plain) {
  const inputs = {};
  for (const [part, factors] of live.scales) {
    inputs[`scale.${part}`] = factors;
    if (!live.means.has(part)) continue;
    for (const [name, { dims, data }] of Object.entries(plain.outputs)) {
      if (name !== part && !name.startsWith(`${part}.`)) continue;
      const width = dims.at(-1), each = width / factors.length, mean = new Float32Array(width);
      data.forEach((v, i) => { mean[i % width] += v * width / data.length; });
      inputs[`mean.${name}`] = mean.map((v, i) => v * (1 - factors[Math.floor(i / each)]));
    }
  }
  return inputs;
}

// -- logits
// Returns the row of an output [1, rows, width] (or [1, width]).
function rowOf(output, i) {
  const width = output.dims.at(-1);
  return output.data.subarray(i * width, (i + 1) * width);
}

function chances(logits, temperature = 1) {
  const most = logits.reduce((a, b) => Math.max(a, b), -Infinity), made = Float64Array.from(logits, (v) => Math.exp((v - most) / temperature));
  const sum = made.reduce((a, b) => a + b, 0);
  return made.map((v) => v / sum);
}

// Returns the `count` likeliest tokens, as [id, probability].
function likeliest(probabilities, count) {
  const found = [];
  probabilities.forEach((p, id) => {
    if (found.length === count && p <= found.at(-1)[1]) return;
    const place = found.findIndex(([, other]) => other < p);
    found.splice(place < 0 ? found.length : place, 0, [id, p]);
    found.length = Math.min(found.length, count);
  });
  return found;
}

const words = new Map(); // token id -> its text
const wordOf = (id) => words.get(id) ?? live.facts.labels[id] ?? `[${id}]`;

// Asks for the texts of all tokens that the page shows for a run.
async function learnNames(...runs) {
  const ids = new Set(runs.flatMap((run) => Object.entries(run.outputs).filter(([name, { dims }]) => name.startsWith("logits") && dims.at(-1) === live.facts.vocabulary)
    .flatMap(([, output]) => [...Array(output.dims.length > 2 ? output.dims[1] : 1).keys()].flatMap((i) => likeliest(rowOf(output, i), 20).map(([id]) => id)))));
  const missing = [...ids].filter((id) => !words.has(id));
  if (!missing.length) return;
  (await send({ names: missing })).forEach((text, i) => words.set(missing[i], text));
}

// The data of a run as those of a page with a prompt: tokens, attention weights by layer, predicted tokens.
function promptOf(run) {
  if (!run) return null;
  const tokens = run.tokens.map((token, i) => token || `[${run.ids[i]}]`), n = tokens.length;
  const layers = Object.entries(run.outputs).filter(([name, { dims }]) => name.startsWith("attention.") && dims[2] === n && dims[3] === n)
    .map(([name, { dims, data }]) => ({ where: name.replace("attention.", ""), at: partOf(name.replace("attention.", "")), heads: dims[1], data }));
  return { tokens, layers, next: [], experts: [] };
}

// The key of the part of the picture that contains a scope; the nearest container if it is no part itself.
function partOf(scope) {
  for (let key = scope; key; key = key.slice(0, Math.max(0, key.lastIndexOf(".")))) if (index().has(key)) return key;
  return DATA.root.inner[0].key;
}
