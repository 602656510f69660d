// Runs the model of this folder with transformers.js. Messages in: {load}, {generate: {messages, ...settings}},
// {compare: {query, texts}}, {classify: text}, {stop}. Messages out: {progress}, {ready}, {text}, {done}, {error}.

const folder = new URL(".", import.meta.url).href;
const FOLD_BYTES = 1.5e9; // of weights in f32 that WebAssembly, with 4 GB, can hold
let library, tokenizer, model, config, device, stopping, cache = null;

async function load({device: wanted, threads}) {
  config = await (await fetch(`${folder}config.json`)).json();
  const {library: script, wasm} = config.weft;
  library = await import(new URL(script, folder).href);
  const {env} = library, onnx = env.backends.onnx.wasm;
  Object.assign(env, {allowRemoteModels: false, allowLocalModels: true, localModelPath: folder, useWasmCache: false, logLevel: 40});
  onnx.numThreads = self.crossOriginIsolated ? threads ?? navigator.hardwareConcurrency : 1;
  if (wasm) {
    const scripts = new URL("javascript/", folder).href;
    onnx.wasmPaths = {mjs: scripts + wasm.replace(".wasm.gz", ".mjs")};
    onnx.wasmBinary = await unpack(await fetch(scripts + wasm));
  }
  const adapter = wanted === "wasm" ? null : await navigator.gpu?.requestAdapter().catch(() => null);
  tokenizer = await library.AutoTokenizer.from_pretrained(".");
  device = adapter ? "webgpu" : "wasm";
  const type = {decoder: "AutoModelForCausalLM", "encoder-decoder": "AutoModelForSeq2SeqLM"}[config.weft.kind]
    ?? "AutoModel";
  const settings = {
    device, session_options: {extra: {session: sessionKeys()}}, progress_callback: progress => postMessage({progress}),
  };
  model = config.weft.states
    ? await (await import("./loader.js")).Decoder.from_pretrained(library, ".", settings)
    : await library[type].from_pretrained(".", settings);
  letMessagesIn(model.model ?? model);
  return {device, threads: onnx.numThreads, isolated: self.crossOriginIsolated, chat: Boolean(tokenizer.chat_template)};
}

// Between two calls of `net`, a message such as {stop} is read: promises alone never let one in.
function letMessagesIn(net) {
  const forward = net.forward.bind(net), {port1, port2} = new MessageChannel();
  net.forward = async inputs => {
    await new Promise(resolve => { port1.onmessage = resolve; port2.postMessage(0); });
    return forward(inputs);
  };
}

// ONNX Runtime decodes weights once in WebAssembly, where its product by codes is slow, if they fit into memory. On a
// GPU it fuses the decoding with products.
function sessionKeys() {
  if (device === "webgpu") return {enable_dq_matmulnbits_fusion: "1"};
  return 4 * config.weft.parameters < FOLD_BYTES ? {disable_quant_qdq: "1"} : {};
}

// Some servers send .gz files decompressed.
async function unpack(response) {
  const bytes = new Uint8Array(await response.arrayBuffer());
  if (bytes[0] !== 0x1f || bytes[1] !== 0x8b) return bytes.buffer;
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

async function generate({messages, max_new_tokens = 512, temperature = 0}) {
  const last = messages[messages.length - 1].content, seq2seq = config.weft.kind === "encoder-decoder";
  const inputs = tokenizer.chat_template && !seq2seq
    ? tokenizer.apply_chat_template(messages, {add_generation_prompt: true, return_dict: true})
    : tokenizer(seq2seq ? last : messages.map(m => m.content).join(""));
  const ids = [...inputs.input_ids.data].map(Number), begin = performance.now();
  const reused = cache && ids.length > cache.ids.length && cache.ids.every((id, i) => id === ids[i]);
  let tokens = 0, first = 0;
  const streamer = new library.TextStreamer(tokenizer, {
    skip_prompt: !seq2seq, skip_special_tokens: true, callback_function: text => postMessage({text}),
    token_callback_function: () => { first ||= performance.now() - begin; tokens++; },
  });
  stopping = new library.InterruptableStoppingCriteria();
  const output = await model.generate({
    ...inputs, max_new_tokens, do_sample: temperature > 0, temperature: temperature || 1, streamer,
    stopping_criteria: stopping, return_dict_in_generate: true, ...(reused ? {past_key_values: cache.keys} : {}),
  });
  const seconds = (performance.now() - begin) / 1000, all = [...output.sequences.data].map(Number);
  // The last token was not computed yet.
  cache = seq2seq ? null : {ids: all.slice(0, -1), keys: output.past_key_values};
  return {tokens, seconds, first: first / 1000, prompt: ids.length, reused: reused ? true : false};
}

// Texts are read one by one: padding would change models whose tokens compete, and the means of others.
async function compare({query, texts}) {
  const {task, sentence} = config.weft, prompts = sentence?.prompts ?? {}, vectors = [], scores = [];
  for (const [i, text] of [query, ...texts].entries()) {
    if (task && i === 0) continue;
    const prompt = (i ? prompts.document : prompts.query) ?? "", options = {truncation: true, return_token_type_ids: true};
    const inputs = task ? tokenizer(query, {...options, text_pair: text}) : tokenizer(prompt + text, options);
    const output = await model(inputs);
    if (task) { scores.push(activate(output.logits.data[0])); continue; }
    const vector = output.sentence_embedding?.tolist()[0] ?? pool(output.last_hidden_state.tolist()[0]);
    const length = Math.hypot(...vector);
    vectors.push(vector.map(x => x / length));
    if (i) scores.push(vectors[i].reduce((sum, x, j) => sum + x * vectors[0][j], 0));
  }
  return {scores, vectors};
}

// The score of a pair of texts.
function activate(logit) {
  const {activation = "sigmoid", template} = config.weft.rank ?? {};
  if (template) throw Error("this page does not render pairs of texts by a chat template");
  return activation === "sigmoid" ? 1 / (1 + Math.exp(-logit)) : logit;
}

function pool(rows) {
  const {pooling = "mean"} = config.weft;
  if (pooling === "cls") return rows[0];
  if (pooling === "last") return rows[rows.length - 1];
  const columns = rows[0].map((_, i) => rows.map(row => row[i]));
  if (pooling === "max") return columns.map(column => Math.max(...column));
  if (pooling !== "mean") throw Error(`this page does not know the pooling ${pooling}`);
  return columns.map(column => column.reduce((sum, x) => sum + x, 0) / column.length);
}

async function classify(text) {
  const logits = (await model(tokenizer(text, {truncation: true}))).logits.tolist()[0];
  const several = config.problem_type === "multi_label_classification" || logits.length === 1;
  const scores = config.problem_type === "regression" ? logits
    : several ? logits.map(x => 1 / (1 + Math.exp(-x))) : library.softmax(logits);
  return {labels: [...scores].map((score, i) => ({label: config.id2label?.[i] ?? `LABEL_${i}`, score}))};
}

onmessage = async ({data}) => {
  if (data.stop) return stopping?.interrupt();
  try {
    if (data.load) postMessage({ready: {...await load(data.load), config}});
    else if (data.generate) postMessage({done: await generate(data.generate)});
    else if (data.compare) postMessage({done: await compare(data.compare)});
    else postMessage({done: await classify(data.classify)});
  } catch (error) {
    postMessage({error: String(error?.message ?? error)});
  }
};
