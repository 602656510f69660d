// A page that follows its file: the server of `weft viz --watch` sends the newest picture after every save.
const WATCH = DATA.watch; // { file, version }
const edits = { values: {}, passes: [] }; // index of a number -> value; names of passes
const fault = WATCH && el("div", { id: "fault", role: "alert", hidden: true });

const askServer = async (question, body) => {
  const response = await fetch(`./${question}`, { method: "POST", body: JSON.stringify(body) }), answer = await response.json();
  if (!response.ok) throw Error(answer.error);
  return answer;
};

async function follow() {
  for (let version = WATCH.version; ;) {
    try {
      const data = await askServer("changes", { version });
      if (data.version !== version) take(data);
      version = data.version;
    } catch {
      showFault({ text: "The server of this page has ended: run weft viz --watch again." });
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

function showFault(error) {
  fault.hidden = !error;
  fault.textContent = error?.text ?? "";
}

const signature = ({ shape }) => JSON.stringify([shape.title, shape.lines, shape.notes, (shape.ops ?? []).map((v) => [v.op, v.attrs, v.makes, v.weights.map((w) => w.slice(0, 3))])]);

// Draws the newest picture, in the same place and with the same parts open; marks parts that are new or changed.
function take(data) {
  showFault(data.error);
  if (data.error) return;
  const before = new Map([...index()].map(([key, found]) => [key, signature(found)]));
  Object.assign(DATA, { root: data.root, opened: data.opened, panels: data.panels, origins: data.origins, watched: data });
  TOUR.splice(0, TOUR.length, ...data.tour);
  forget();
  const here = { ...at };
  for (const key of data.opened) opened.add(key);
  draw();
  Object.assign(at, here);
  apply();
  fresh.clear();
  for (const [key, found] of index()) if (key && before.get(key) !== signature(found)) fresh.add(key);
  mark();
  $("totals").textContent = data.totals;
  if (open.tab === "part" && !shapeAt(chosen)) closePanel(); else if (open.tab) refresh();
}

const sendEdits = () => askServer("edit", edits).catch((error) => showFault({ text: error.message }));

if (WATCH) {
  $("stage").append(fault);
  tab("numbers", "Numbers", () => (DATA.watched?.numbers ?? []).flatMap(numberOf).concat(factsOf()), true);
  tab("passes", "Passes", passesOf, true);
  follow();
}

// -- numbers of the file
const compared = new Map(); // index of a number -> facts for other values
const METRICS = { parameters: ["parameters", told], cache: ["cache of a full context", toldBytes], flops: ["FLOPs per token", told], seconds: ["time per token", toldTime] };
let metric = "parameters";

function numberOf({ name, value, line, now, range }, i) {
  const shown = el("output", {}, now.toLocaleString("en"));
  const input = el("input", { type: "range", min: 1, max: Math.max(4 * value, 8), value: now, "aria-label": `${name}, line ${line}`,
    oninput: () => { shown.textContent = (+input.value).toLocaleString("en"); },
    onchange: () => { if (+input.value === value) delete edits.values[i]; else edits.values[i] = +input.value; sendEdits(); } });
  const more = compared.has(i) ? [comparisonOf(i, name)] : [];
  return [el("div", { class: "factor" }, el("span", {}, name, " ", el("small", {}, `line ${line}`)), input, shown,
    el("button", { onclick: async () => { if (compared.delete(i)) refresh(); else { compared.set(i, await askServer("compare", { number: i })); refresh(); } } }, "compare")), ...more];
}

// The least time of a decode step: that of reading the weights in use and the cache, or of computing.
const secondsOf = ({ active, cache, flops }) => roofline(flops, 2 * active + cache).seconds;

function comparisonOf(i, name) {
  const points = compared.get(i), fine = points.filter((p) => !p.error), [title, format] = METRICS[metric];
  const valueOf = (p) => (metric === "seconds" ? secondsOf(p) : p[metric]), high = Math.max(...fine.map(valueOf), 1e-12);
  const pick = el("select", { "aria-label": "Compared", onchange: (e) => { metric = e.target.value; refresh(); } }, Object.entries(METRICS).map(([key, [text]]) => el("option", { value: key, selected: key === metric }, text)));
  return el("div", {}, pick, fine.length ? chart({ titled: `${title} by ${name}`, x: { title: name, low: fine[0].value, high: fine.at(-1).value, format: (v) => v.toLocaleString("en") },
    y: { title, low: 0, high, format }, series: [{ name: title, points: fine.map((p) => [p.value, valueOf(p)]) }] }) : null,
  ...points.filter((p) => p.error).map((p) => el("p", {}, el("small", {}, `${p.value}: ${p.error}`))));
}

const factsOf = () => (DATA.watched ? [head("This model"), rows(Object.entries(METRICS).map(([key, [title, format]]) => [title, format(key === "seconds" ? secondsOf(DATA.watched.facts) : DATA.watched.facts[key])])),
  el("p", {}, el("button", { onclick: () => { edits.values = {}; sendEdits(); } }, "As in the file"))] : []);

// -- passes
function passesOf() {
  const data = DATA.watched;
  if (!data) return [];
  const groups = [...new Set(data.passes.map((p) => p.purpose))];
  const row = (p) => el("div", { class: "pass" }, el("label", {}, el("input", { type: "checkbox", checked: edits.passes.includes(p.name), onchange: (e) => {
    edits.passes = e.target.checked ? [...edits.passes, p.name] : edits.passes.filter((name) => name !== p.name);
    sendEdits();
  } }), " ", el("b", {}, p.name), " ", el("small", {}, `${p.effect}: ${p.about}`)),
  "rewrites" in p ? el("p", {}, p.idle || `${counted(p.rewrites, "rewrite")}. ${p.evidence ? `Checked: ${p.evidence}` : ""}${p.difference ? ` Largest difference: ${p.difference.toExponential(1)}.` : ""}`) : null);
  const kernels = el("div", {});
  askServer("launches", {}).then((launches) => kernels.replaceChildren(typeof launches === "string" ? el("p", {}, launches)
    : el("table", {}, el("tbody", {}, launches.map(([name, count]) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, name)), el("td", {}, count)))))));
  return [...groups.flatMap((group) => [el("details", { open: data.passes.some((p) => p.purpose === group && edits.passes.includes(p.name)) }, el("summary", {}, group), data.passes.filter((p) => p.purpose === group).map(row))]),
    head("Kernels of a decode step"), kernels];
}
