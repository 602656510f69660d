// The page about rotary positions: wavelengths of the pairs of a head.
if (DATA.panels?.positions) tab("positions", "Positions", () => DATA.panels.positions.flatMap((p) => {
  const series = [{ name: p.after ? "before" : "wavelength", points: p.before.map((w, i) => [i, w]) }];
  if (p.after) series.unshift({ name: p.scaling, points: p.after.map((w, i) => [i, w]) });
  const values = [...p.before, ...(p.after ?? []), p.context, p.original].filter((v) => v > 0);
  const lines = [];
  if (p.original) lines.push({ y: p.original, name: `trained on ${p.original.toLocaleString("en")} tokens` });
  if (p.context && p.context !== p.original) lines.push({ y: p.context, name: `context ${p.context.toLocaleString("en")}` });
  const beyond = (p.after ?? p.before).filter((w) => w === null || w > (p.context ?? Infinity)).length;
  return [head(`RoPE${p.scaling === "none" ? "" : `, ${p.scaling}`}: ${p.where}`), ...p.sentences.map((text) => el("p", {}, text)),
    p.context ? el("p", {}, `${beyond} of ${p.before.length} pairs do not finish a turn within the context: they tell how far apart tokens are, the others repeat.`) : null,
    chart({ titled: "Wavelength of each rotary pair, in tokens", x: { title: "pair", low: 0, high: Math.max(1, p.before.length - 1), format: String },
      y: { title: "tokens for a turn", log: true, low: Math.min(...values), high: Math.max(...values) * 1.3, format: (v) => told(v) }, series, lines, height: 300 }),
    el("p", {}, link(p.at, "Show in the picture"))].filter(Boolean);
}), true);
