// Search in names and titles of parts, operations, weights and recipes, also in folded layers.
const field = $("search"), found = $("found");
const matches = new Set(); // keys of the parts that match
let results = [], place = -1, texts = null;

// Returns [key, text to search in lower case] for every part.
const wordsOf = (v) => [v.name, v.op, ...v.makes.map(([name]) => name), ...v.weights.flatMap(([name, , , , recipe]) => [name, recipe.slice(0, 400)])];
function searchable() {
  texts ??= [...index()].filter(([key]) => key).map(([key, { shape }]) =>
    [key, [key, shape.title, ...shape.lines, ...(shape.ops ?? []).flatMap(wordsOf)].join("\n").toLowerCase()]);
  return texts;
}

function search() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean), whole = words.join(" ");
  results = words.length ? searchable().filter(([, text]) => words.every((word) => text.includes(word))).map(([key]) => key) : [];
  const rank = (key) => (key.toLowerCase() === whole ? 0 : `.${key.toLowerCase()}.`.includes(`.${whole}.`) ? 1 : 2);
  results = results.map((key) => [rank(key), key]).sort((a, b) => a[0] - b[0]).map(([, key]) => key);
  place = -1;
  matches.clear();
  results.forEach((key) => matches.add(key));
  tell();
  mark();
}

function tell() {
  const count = place < 0 ? counted(results.length, "match", "matches") : `${place + 1} of ${results.length.toLocaleString("en")}`;
  found.textContent = field.value.trim() ? count : "";
  found.classList.toggle("none", !!field.value.trim() && !results.length);
}

function next(by) {
  if (!results.length) return;
  place = (place + by + results.length) % results.length;
  if (place < 0) place += results.length;
  go(results[place]);
  tell();
}

function clearSearch() {
  field.value = "";
  search();
}

field.addEventListener("input", search);
field.addEventListener("keydown", (e) => {
  if (e.key === "Enter") { e.preventDefault(); next(e.shiftKey ? -1 : 1); }
  if (e.key === "Escape") { e.preventDefault(); e.stopPropagation(); if (field.value) clearSearch(); else focusCurrent(true); }
});
