// node transformers.mjs NODE_MODULES < JOBS: runs models in transformers.js. JOBS is a JSON list of
//   {folder, class, options?, inputs: {name: rows of integers}, generate?: settings}
//   {folder, texts, generate, options?}        the texts, padded to the longest, are continued
//   {folder, pairs: [[text, other]], class}     the logits of each pair
// Prints a JSON list of {outputs: {name: nested list}}, {tokens: rows}, {texts} or {error}.
import fs from "node:fs";
import path from "node:path";

const library = await import(path.join(process.argv[2], "@huggingface/transformers/dist/transformers.node.mjs"));
const {env, AutoTokenizer, Tensor} = library;
Object.assign(env, {allowRemoteModels: false, logLevel: 50});

const integers = rows => new Tensor("int64", BigInt64Array.from(rows.flat(), BigInt), [rows.length, rows[0].length]);

async function run({folder, class: name, options = {}, inputs, texts, pairs, generate}) {
  env.localModelPath = path.dirname(folder) + "/";
  const id = path.basename(folder);
  const model = name === "Decoder"
    ? await (await import(path.join(folder, "loader.js"))).Decoder.from_pretrained(library, id, options)
    : await library[name].from_pretrained(id, options);
  const tokenizer = texts || pairs ? await AutoTokenizer.from_pretrained(id) : null;
  if (tokenizer) tokenizer.padding_side = "left";
  if (pairs) {
    const rows = [];
    for (const [text, other] of pairs) rows.push((await model(tokenizer(text, {text_pair: other}))).logits.tolist()[0]);
    return {outputs: {logits: rows}};
  }
  const fed = texts ? tokenizer(texts, {padding: true})
    : Object.fromEntries(Object.entries(inputs).map(([key, rows]) => [key, integers(rows)]));
  if (!generate) {
    const outputs = Object.entries(await model(fed)).filter(([, tensor]) => tensor?.tolist);
    return {outputs: Object.fromEntries(outputs.map(([key, tensor]) => [key, tensor.tolist()]))};
  }
  const result = await model.generate({...fed, do_sample: false, ...generate});
  const tokens = (result.sequences ?? result).tolist().map(row => row.map(Number));
  return texts ? {texts: tokenizer.batch_decode(tokens, {skip_special_tokens: true})} : {tokens};
}

const replies = [];
for (const job of JSON.parse(fs.readFileSync(0, "utf8"))) {
  replies.push(await run(job).catch(error => ({error: String(error.stack ?? error)})));
}
fs.writeFileSync(1, JSON.stringify(replies));
process.exit(0);
