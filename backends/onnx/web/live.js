// Runs the model of a live page. Messages in: {id, load: {quickly}}, {id, run: {text or ids, inputs, chosen, want}}.
// Messages out: {id, result}, {id, error}, {progress: {loaded, total}}.

const folder = new URL(".", import.meta.url).href;
let ort, session, tokenizer, model;

async function load({threads, quickly}) {
  model = await (await fetch(`${folder}live.json`)).json();
  const at = file => new URL(file, folder).href;
  const [runtime, wasm, files, text] = await Promise.all([
    import(at(model.runtime)), fetch(at(model.wasm)).then(unpack), Promise.all([model.model, ...model.data].map(read)),
    model.tokenizers ? openTokenizer(at(model.tokenizers)) : null,
  ]);
  ort = runtime.default ?? runtime;
  tokenizer = text;
  ort.env.logLevel = "error";
  Object.assign(ort.env.wasm, {wasmBinary: wasm, proxy: false,
    numThreads: self.crossOriginIsolated ? threads ?? Math.min(8, navigator.hardwareConcurrency) : 1});
  // Products by codes are slow in WebAssembly: weights are decoded, in each run, or once, which takes seconds.
  session = await ort.InferenceSession.create(files[0], {
    executionProviders: ["wasm"], graphOptimizationLevel: quickly ? "disabled" : "extended", extra: {session: {disable_quant_qdq: "1"}},
    externalData: model.data.map((path, i) => ({path, data: files[i + 1]})),
  });
  const inputs = session.inputMetadata.map(({name, type, shape}) => ({name, type, shape}));
  return {...model, inputs, outputs: session.outputNames, threads: ort.env.wasm.numThreads};
}

async function openTokenizer(script) {
  const [{Tokenizer}, rules, config] = await Promise.all([import(script),
    ...["tokenizer.json", "tokenizer_config.json"].map(async file => {
      const response = await fetch(folder + file);
      return response.ok ? response.json() : {};
    })]);
  return new Tokenizer(rules, config);
}

const sizes = {};
async function read(file) {
  const response = await fetch(folder + file);
  if (!response.ok) throw Error(`${file} cannot be read: ${response.status} ${response.statusText}`);
  const total = +response.headers.get("content-length") || 0, parts = [], reader = response.body.getReader();
  let loaded = 0;
  for (let next = await reader.read(); !next.done; next = await reader.read()) {
    parts.push(next.value);
    loaded += next.value.length;
    sizes[file] = {loaded, total: Math.max(total, loaded)};
    const sum = name => Object.values(sizes).reduce((n, size) => n + size[name], 0);
    postMessage({progress: {loaded: sum("loaded"), total: sum("total")}});
  }
  const bytes = new Uint8Array(loaded);
  parts.reduce((at, part) => (bytes.set(part, at), at + part.length), 0);
  return bytes;
}

// Some servers send .gz files decompressed.
async function unpack(response) {
  const bytes = new Uint8Array(await response.arrayBuffer());
  if (bytes[0] !== 0x1f || bytes[1] !== 0x8b) return bytes.buffer;
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

// Token ids of a text; without a tokenizer the text lists them.
const encode = text => (tokenizer ? tokenizer.encode(text).ids : text.split(/[\s,]+/).filter(Boolean).map(Number));
const decode = ids => (tokenizer ? tokenizer.decode(ids, {skip_special_tokens: true}) : ids.join(" "));

// The characters that each token adds to the text; "" for special tokens, as BOS.
function pieces(ids) {
  let before = "";
  return ids.map((_, i) => {
    const after = decode(ids.slice(0, i + 1)), added = after.startsWith(before) ? after.slice(before.length) : "";
    before = after;
    return added;
  });
}

// `inputs` are the factors (and means) of parts by name; others are 1 (means 0).
async function run({text, ids, inputs = {}, chosen, want = []}) {
  ids ??= encode(text);
  if (!ids.length) return {ids, tokens: [], outputs: {}};
  if (ids.length > model.context) throw Error(`the text has ${ids.length} tokens; the model reads ${model.context}`);
  const begin = performance.now(), n = ids.length, whole = row => new ort.Tensor("int64", BigInt64Array.from(row, BigInt), [1, row.length]);
  const known = {input_ids: ids, position_ids: ids.map((_, i) => i), attention_mask: ids.map(() => 1), token_type_ids: ids.map(() => 0),
    chosen_tokens: [Math.min(chosen ?? n - 1, n - 1)]};
  const feeds = Object.fromEntries(session.inputMetadata.map(({name, shape}) => {
    if (name in known) return [name, whole(known[name])];
    const data = inputs[name] ?? new Float32Array(shape[0]).fill(name.startsWith("scale.") ? 1 : 0);
    return [name, new ort.Tensor("float32", Float32Array.from(data), shape)];
  }));
  const names = session.outputNames.filter(name => want.some(start => name === start || name.startsWith(`${start}.`)));
  const made = await session.run(feeds, names), outputs = {};
  for (const name of names) outputs[name] = {dims: made[name].dims, data: made[name].data};
  return {ids, tokens: pieces(ids), outputs, seconds: (performance.now() - begin) / 1000};
}

let last = Promise.resolve(); // one run at a time
onmessage = ({data: {id, ...asked}}) => {
  last = last.then(async () => {
    try {
      const result = asked.load ? await load(asked.load) : asked.names ? asked.names.map(i => decode([i])) : await run(asked.run);
      postMessage({id, result}, asked.run ? Object.values(result.outputs).map(({data}) => data.buffer) : []);
    } catch (error) {
      postMessage({id, error: String(error?.message ?? error)});
    }
  });
};
