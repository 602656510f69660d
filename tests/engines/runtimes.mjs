// Runs ONNX files in onnxruntime-node or onnxruntime-web for runtimes.py: node runtimes.mjs FOLDER NAME DESCRIPTOR.
import fs from "node:fs";
import path from "node:path";
import readline from "node:readline";
import { pathToFileURL } from "node:url";

const [folder, name, descriptor] = process.argv.slice(2);
const ENTRIES = { "ort-node": "onnxruntime-node/dist/index.js", "ort-web": "onnxruntime-web/dist/ort.node.min.mjs" };
const imported = await import(pathToFileURL(path.join(folder, "node_modules", ENTRIES[name])));
const ort = imported.InferenceSession ? imported : imported.default;

// numpy's name of a dtype → [name of the tensor type, class of its elements]
const TYPES = {
  float32: ["float32", Float32Array], float16: ["float16", Uint16Array], float64: ["float64", Float64Array],
  int64: ["int64", BigInt64Array], int32: ["int32", Int32Array], int8: ["int8", Int8Array],
  uint8: ["uint8", Uint8Array], bool: ["bool", Uint8Array],
};
const NAMES = Object.fromEntries(Object.entries(TYPES).map(([name, [type]]) => [type, name]));

function decode([dtype, dims, data]) {
  const [type, Elements] = TYPES[dtype];
  const bytes = new Uint8Array(Buffer.from(data, "base64"));
  return new ort.Tensor(type, new Elements(bytes.buffer), dims);
}

function encode(tensor) {
  const { buffer, byteOffset, byteLength } = tensor.data;
  return [NAMES[tensor.type], [...tensor.dims], Buffer.from(buffer, byteOffset, byteLength).toString("base64")];
}

async function load(file) {
  // Without this, activations before quantized weights are rounded to 8 bits.
  const options = { extra: { session: { qdq_matmulnbits_accuracy_level: "1" } } };
  if (name === "ort-node") return ort.InferenceSession.create(file, options);
  const siblings = fs.readdirSync(path.dirname(file)).filter((f) => /[._]data(_\d+)?$/.test(f));
  const read = (f) => new Uint8Array(fs.readFileSync(path.join(path.dirname(file), f)));
  const externalData = siblings.map((f) => ({ path: f, data: read(f) }));
  return ort.InferenceSession.create(new Uint8Array(fs.readFileSync(file)), { ...options, externalData });
}

const mapValues = (entries, f) => Object.fromEntries(Object.entries(entries).map(([key, value]) => [key, f(value)]));
let loaded = {};
for await (const line of readline.createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  const key = `${request.path} ${fs.statSync(request.path).mtimeMs}`;
  let reply;
  try {
    if (loaded.key !== key) {
      await loaded.session?.release();
      loaded = {};
      loaded = { key, session: await load(request.path) };
    }
    const outputs = await loaded.session.run(mapValues(request.inputs, decode));
    reply = { outputs: mapValues(outputs, encode) };
  } catch (error) {
    reply = { error: String(error?.message ?? error) };
  }
  fs.writeSync(Number(descriptor), JSON.stringify(reply) + "\n");
}
