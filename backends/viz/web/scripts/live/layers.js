// Views of a live page by layer: what each layer would predict, norms of the residual stream, experts, states.
const outputsOf = (kind) => (live.run ? Object.entries(live.run.outputs).filter(([name]) => name.startsWith(`${kind}.`)).map(([name, output]) => [name.slice(kind.length + 1), output]) : []);
const normOf = (row) => Math.hypot(...row);

liveViews.set("layers", { title: "Layers", has: () => outputsOf("residual").length > 0, make: () => {
  const at = chosenToken(), lens = outputsOf("logits"), stream = outputsOf("residual").filter(([, { dims }]) => dims[1] === live.run.tokens.length), made = [];
  if (lens.length) {
    const rows = lens.map(([layer, output]) => [layer, likeliest(chances(rowOf(output, 0)), 3)]);
    made.push(head("What each layer would predict"), el("p", {}, `The head of the model applied to the residual stream after each layer, for "${spelled(PROMPT.tokens[at])}" (the logit lens).`),
      el("div", { class: "scroll" }, el("table", { class: "lens" }, el("thead", {}, el("tr", {}, ["after", "first", "second", "third"].map((name) => el("th", { scope: "col" }, name)))),
        el("tbody", {}, rows.map(([layer, best]) => el("tr", {}, el("th", { scope: "row" }, link(partOf(layer), layer)), best.map(([id, p]) => el("td", { style: `--w:${(65 * Math.sqrt(p)).toFixed(0)}%` }, el("code", {}, spelled(wordOf(id)) || `[${id}]`), ` ${(100 * p).toFixed(0)} %`))))))));
  }
  if (stream.length) {
    const norms = stream.map(([, output]) => [...Array(output.dims[1]).keys()].map((i) => normOf(rowOf(output, i)))), high = Math.max(...norms.flat());
    const mean = (row) => row.reduce((a, b) => a + b, 0) / row.length;
    made.push(head("Length of the residual stream"), chart({ titled: "Norm of the residual stream by layer",
      x: { title: "layers", low: 0, high: stream.length - 1, format: (v) => v }, y: { title: "norm", low: 0, high, format: (v) => +v.toPrecision(3) },
      series: [{ name: spelled(PROMPT.tokens[at]).trim() || "token", points: norms.map((row, i) => [i, row[at]]) }, { name: "mean", points: norms.map((row, i) => [i, mean(row)]) }] }));
  }
  return made;
} });

// A heat map of [rows, columns] numbers: blue above 0, orange below; names of the rows on the left.
function heatMap(data, rows, columns, titled, rowName) {
  const most = data.reduce((a, v) => Math.max(a, Math.abs(v)), 0) || 1, canvas = el("canvas", { width: columns, height: rows, role: "img", "aria-label": titled }), pen = canvas.getContext("2d"), image = pen.createImageData(columns, rows);
  for (let i = 0; i < rows * columns; i++) image.data.set([...(data[i] < 0 ? [184, 74, 0] : [44, 111, 176]), 255 * Math.sqrt(Math.abs(data[i]) / most)], 4 * i);
  pen.putImageData(image, 0, 0);
  const height = Math.min(420, Math.max(80, rows * Math.min(18, 240 / rows)));
  Object.assign(canvas.style, { width: "100%", height: `${height}px`, imageRendering: "pixelated" });
  const told = el("output", { class: "values" }, `largest magnitude: ${most.toPrecision(3)}`);
  canvas.addEventListener("pointermove", (e) => {
    const area = canvas.getBoundingClientRect(), r = Math.floor((e.clientY - area.top) / area.height * rows), c = Math.floor((e.clientX - area.left) / area.width * columns);
    if (r >= 0 && r < rows && c >= 0 && c < columns) told.textContent = `${rowName(r)}, ${c}: ${data[r * columns + c].toPrecision(4)}`;
  });
  return el("figure", {}, canvas, told);
}

liveViews.set("experts", { title: "Experts", has: () => outputsOf("routes").length > 0, make: () => outputsOf("routes").flatMap(([layer, output]) => {
  const count = output.dims.at(-1), at = chosenToken(), row = rowOf(output, at), chosen = [...row].map((w, e) => [e, w]).filter(([, w]) => w > 0).sort((a, b) => b[1] - a[1]);
  return [head(layer), heatMap(output.data, output.data.length / count, count, `Weights of the experts of ${layer} by token`, (r) => `"${spelled(PROMPT.tokens[r] ?? "")}", expert`),
    el("p", {}, `"${spelled(PROMPT.tokens[at])}" is computed by `, chosen.map(([e, w]) => `expert ${e} (${(100 * w).toFixed(0)} %)`).join(", "), ". ", link(partOf(layer), "show"))];
}) });

liveViews.set("states", { title: "States", has: () => outputsOf("states").length > 0, make: () => outputsOf("states").flatMap(([name, { dims, data }]) => {
  const columns = dims.at(-1), rows = data.length / columns;
  return [head(name), el("p", {}, `State after the last token: ${dims.slice(1).join(" × ")}. `, link(partOf(name), "show")), heatMap(data, rows, columns, `State ${name}`, (r) => `row ${r}`)];
}) });

// -- the chosen part: what it returned for every token
if (LIVE) section(30, (shape) => {
  const names = (shape.ops ?? []).flatMap((v) => v.makes.map(([name]) => `parts.${name}`)).filter((name) => live.facts?.outputs.includes(name));
  if (!names.length) return null;
  const place = el("div", {});
  const fill = () => {
    const shown = names.filter((name) => live.run?.outputs[name]);
    place.replaceChildren(...(shown.length ? shown.flatMap((name) => {
      const { dims, data } = live.run.outputs[name], columns = dims.slice(2).reduce((a, b) => a * b, 1);
      return [head("What it returns for this text"), heatMap(data, dims[1], columns, `Values of ${name}`, (r) => `"${spelled(PROMPT.tokens[r] ?? "")}", feature`)];
    }) : []));
  };
  if (names.some((name) => !live.run?.outputs[name])) { live.seen = names; ask().then(fill); }
  fill();
  return [place];
});
