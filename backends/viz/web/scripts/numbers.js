// Costs of parts for the chosen sequence length, dtype and device, computed exactly in integers.
const N = DATA.numbers, TOKENS = DATA.tokens ?? N.tokens;
const scale = { tokens: TOKENS, dtype: Object.keys(N.dtypes)[0], device: Object.keys(N.devices)[0] };
const NO_WORK = [0, 0, 0, 0, 0];

// Evaluates a polynomial (see part_costs.py) for sizes by name, as a BigInt.
const exact = (size, at) => (typeof size === "number" ? BigInt(size) : size.reduce((sum, [c, ...factors]) =>
  sum + factors.reduce((value, [atom, power]) => value * sized(atom, at) ** BigInt(power), BigInt(c)), 0n));

const calls = { min: (a, b) => (a < b ? a : b), max: (a, b) => (a > b ? a : b), floordiv: (a, b) => a / b };
const sized = (atom, at) => (typeof atom === "string" ? BigInt(at[atom]) : calls[atom[0]](...atom.slice(1).map((a) => exact(a, at))));

// Returns FLOPs and bytes of a list [FLOPs, elements read, elements written, bytes read, bytes written].
function worked(work, at, item) {
  const [flops, read, written, readBytes, writtenBytes] = (work ?? NO_WORK).map((size) => exact(size, at));
  return { flops, read: read * item + readBytes, written: written * item + writtenBytes };
}

// Returns all costs of a part, as in `weft inspect --json`: of a prefill, and of a decode step (step_…).
function numbersOf(shape, { tokens, dtype } = scale) {
  const facts = shape.facts ?? {}, item = BigInt(N.dtypes[dtype]);
  const at = { batch: 1, past: 0, seq: tokens, total: tokens, capacity: tokens, source: tokens };
  const step = worked(generates() ? facts.step : NO_WORK, at, item);
  const kept = (facts.cache ?? []).reduce((sum, [width, window]) => sum + width * Math.min(window ?? tokens, tokens), 0);
  const [numbers, bytes] = facts.state ?? [0, 0];
  return { parameters: BigInt(facts.parameters ?? 0), ...worked(facts.work, at, item),
    step_flops: step.flops, step_read: step.read, step_written: step.written, cache: BigInt(kept) * item, state: BigInt(numbers) * item + BigInt(bytes) };
}

const generates = () => !!(DATA.root.facts?.cache || DATA.root.facts?.state);

// Returns the position on the roofline (Williams 2009): FLOPs per byte, the limit (compute or memory), and seconds.
function roofline(flops, bytes, { dtype, device } = scale) {
  const { rates, memory } = N.devices[device], [f, b] = [Number(flops), Number(bytes)];
  const [computing, moving] = [f / rates[dtype], b / memory];
  return { intensity: b ? f / b : 0, side: computing > moving ? "compute" : "memory", seconds: Math.max(computing, moving), ridge: rates[dtype] / memory };
}

// -- formatted numbers
function told(n, units = [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
  const value = Number(n), [unit, size] = units.find(([, s]) => value >= s) ?? ["", 1];
  return unit ? `${significant(value / size)} ${unit}` : value.toLocaleString("en", { maximumFractionDigits: 1 });
}
const significant = (v) => (v >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(3)));
const toldBytes = (n) => (Number(n) < 1024 ? `${n} B` : `${told(n, [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])}`);
const toldTime = (s) => (s >= 1 ? `${significant(s)} s` : s >= 1e-3 ? `${significant(s * 1e3)} ms` : `${significant(s * 1e6)} µs`);
const share = (part, whole) => (Number(whole) ? `${(100 * Number(part) / Number(whole)).toPrecision(3).replace(/\.?0+$/, "")} %` : "");

// -- choices in the header
const length = el("input", { type: "number", id: "tokens", min: 1, max: 1e7, value: scale.tokens, "aria-label": "Tokens of a text", title: "Tokens of a text, for FLOPs, bytes and caches",
  onchange: () => { const n = Math.floor(+length.value); if (n >= 1 && n <= 1e7) rescale({ tokens: n }); else length.value = scale.tokens; } });
const picker = (id, of, label) => el("select", { id, "aria-label": label, title: label, onchange: (e) => rescale({ [id]: e.target.value }) },
  Object.keys(of).map((name) => el("option", {}, name)));
const dtypes = picker("dtype", N.dtypes, "Dtype of weights and activations"), devices = picker("device", N.devices, "Device");
$("tabs").after(el("div", { id: "scale", class: "group", role: "group", "aria-label": "What numbers are for" }, el("label", {}, length, " tokens"), dtypes, devices));

function rescale(chosenNow) {
  Object.assign(scale, chosenNow);
  for (const [box, value] of [[length, scale.tokens], [dtypes, scale.dtype], [devices, scale.device]]) box.value = value;
  if (open.tab) refresh();
  keep();
}

keepers.push({
  write(state) {
    if (scale.tokens !== TOKENS) state.set("tokens", scale.tokens);
    if (scale.dtype !== Object.keys(N.dtypes)[0]) state.set("dtype", scale.dtype);
    if (scale.device !== Object.keys(N.devices)[0]) state.set("device", scale.device);
  },
  read(state) {
    const tokens = Math.floor(+state.get("tokens"));
    rescale({ tokens: tokens >= 1 && tokens <= 1e7 ? tokens : TOKENS,
      dtype: N.dtypes[state.get("dtype")] ? state.get("dtype") : Object.keys(N.dtypes)[0],
      device: N.devices[state.get("device")] ? state.get("device") : Object.keys(N.devices)[0] });
  },
});

// -- costs of the chosen part
const cell = (name, n, text) => el("td", { "data-number": name, "data-exact": String(n), title: Number(n).toLocaleString("en") }, text);

section(20, (shape) => {
  const n = numbersOf(shape), whole = numbersOf(wholeOf(shape)), steps = generates();
  if (!shape.facts || (!n.parameters && !n.flops && !n.read && !n.step_read)) return null;
  const [all, one] = [roofline(n.flops, n.read + n.written), roofline(n.step_flops, n.step_read + n.step_written)];
  const pair = (name, first, second) => el("tr", {}, el("th", { scope: "row" }, name), first, steps ? second : null);
  const roofs = (told) => [el("td", {}, n.read ? told(all) : ""), el("td", {}, n.step_read ? told(one) : "")];
  const work = [["FLOPs", "flops", told], ["bytes read", "read", toldBytes], ["bytes written", "written", toldBytes]];
  return [head("Numbers"),
    n.parameters ? el("p", {}, el("b", { "data-number": "parameters", "data-exact": String(n.parameters) }, n.parameters.toLocaleString("en")), ` parameters, ${share(n.parameters, whole.parameters)} of the model`) : null,
    el("table", { class: "numbers" },
      el("thead", {}, el("tr", {}, el("td"), el("th", { scope: "col" }, counted(scale.tokens, "token")), steps ? el("th", { scope: "col" }, "one more token") : null)),
      el("tbody", {},
        work.map(([name, key, told]) => pair(name, cell(key, n[key], told(n[key])), cell(`step_${key}`, n[`step_${key}`], told(n[`step_${key}`])))),
        pair("FLOPs a byte", ...roofs((at) => significant(at.intensity))),
        pair("bound by", ...roofs((at) => at.side)),
        pair(`time, ${scale.device}`, ...roofs((at) => toldTime(at.seconds))))),
    n.cache ? el("p", {}, "KV cache of the text: ", el("b", { "data-number": "cache", "data-exact": String(n.cache) }, toldBytes(n.cache))) : null,
    n.state ? el("p", {}, "State size (independent of text length): ", el("b", { "data-number": "state", "data-exact": String(n.state) }, toldBytes(n.state))) : null,
    el("details", {}, el("summary", {}, "how these are counted"), el("p", {}, `A multiply-add is two FLOPs. The decode step is the last of ${scale.tokens.toLocaleString("en")} tokens: weights are read once, keys and values of all tokens from the cache. `,
      `Roofline bound on ${scale.device} in ${scale.dtype} at peak rates: ${told(N.devices[scale.device].rates[scale.dtype])}FLOP/s, ${told(N.devices[scale.device].memory)}B/s; `,
      `memory below ${significant(all.ridge)} FLOPs a byte. Times are the least possible.`, shape.facts.unknown ? " The cost of some of its operations is not known." : "")),
  ];
});

// -- the module that created the part, and its line in the architecture file
section(30, (shape) => {
  const scope = shape.repeat ? shape.key.replace(/-\d+$/, "") : shape.key, made = DATA.origins?.modules[DATA.origins.of[scope]];
  return made ? [head("Made by"), el("pre", {}, broken(made[0], 0).join("\n")), ...(made[1] ? [el("p", {}, "line ", el("code", {}, made[1]))] : [])] : null;
});
