// Repeats: only one round is stored; the others are copies with increased layer numbers (as in plain.py).
function moved(text, { prefix, depth, low, high }, by) {
  if (text.startsWith(prefix) && text.includes(".")) {
    const words = text.split(".");
    if (words.length > depth && /^\d+(-\d+)?$/.test(words[depth])) words[depth] = words[depth].replace(/\d+/g, (n) => +n + by);
    return words.join(".");
  }
  return text.replace(/(['"])(.*?)\1/g, (_, quote, key) => {
    const words = key.split("."), i = words.findIndex((w) => /^\d+$/.test(w) && +w >= low && +w <= high);
    if (i >= 0) words[i] = +words[i] + by;
    return quote + words.join(".") + quote;
  });
}

function copied(plain, move, by) {
  if (typeof plain === "string") return moved(plain, move, by);
  if (Array.isArray(plain)) return plain.map((v) => copied(v, move, by));
  if (plain === null || typeof plain !== "object") return plain;
  const made = {};
  for (const name in plain) if (name !== "times") made[name] = copied(plain[name], move, by);
  return made;
}

function patched(plain, changes) {
  for (const [path, value] of changes ?? []) {
    const at = path.slice(0, -1).reduce((inner, name) => inner[name], plain);
    at[path.at(-1)] = value;
  }
  return plain;
}

// Returns a repeat with a part for each round, whether or not these are drawn.
function unrolled(shape) {
  if (shape.times) return shape.times;
  const { count, parallel, period, moves, once, changed } = shape.repeat;
  const first = once.inner ? once : { ...once, inner: shape.inner, box: shape.box, wires: shape.wires };
  const inner = [first];
  for (let i = 1; i < count; i++) {
    inner.push(patched(i === 1 ? copied(first, moves[0], period) : copied(inner[1], moves[1], (i - 1) * period), changed[i]));
  }
  const all = [...inner.keys()];
  const over = (edge, k) => inner.map((s) => [...new Set(s.wires.filter((w) => w[k] === edge && w[3] !== "rail").flatMap((w) => w[2]))]);
  const into = over(START, 0), out = over(END, 1);
  const { rails } = shape.repeat;
  return shape.times = { ...shape, inner, rails: rails.length,
    box: parallel ? ["c", ["b", ...all.map((i) => ["c", i])]] : ["c", ...all],
    wires: parallel ? all.flatMap((i) => [[START, i, into[i], "fork", [0], []], [i, END, out[i], "merge", [0], []]])
      : [...all.map((i) => [i ? i - 1 : START, i, into[i], "", [], []]), [count - 1, END, out.at(-1), "", [], []],
        ...rails.flatMap((values, k) => all.map((i) => [START, i, values, "rail", [k], []]))] };
}

// Returns a shape as it is drawn: a repeat with all rounds if they are open.
const shown = (shape) => (shape.repeat && opened.has(shape.key + Z.ALL) ? unrolled(shape) : shape);
