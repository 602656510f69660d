// The page about caches: KV cache bytes by sequence length, for this model and variants with other head counts.
const keptBytes = (kept, tokens, dtype = scale.dtype) => kept.reduce((sum, [width, window]) => sum + width * Math.min(window ?? tokens, tokens), 0) * N.dtypes[dtype];
const stateBytes = ([numbers, bytes], dtype = scale.dtype) => numbers * N.dtypes[dtype] + bytes;

if (DATA.panels?.caches) tab("caches", "Cache", () => {
  const { variants, context, same, state } = DATA.panels.caches, fixed = stateBytes(state);
  const high = Math.max(context ?? 0, 131072), xs = doublings(128, high), bytes = (v, n) => keptBytes(v.kept, n) + fixed;
  const series = variants.map((v) => ({ name: v.name, points: xs.map((n) => [n, bytes(v, n)]) }));
  const all = series.flatMap((s) => s.points.map(([, b]) => b)).filter((b) => b > 0), first = variants[0];
  const at = scale.tokens, windows = [...new Set(first.kept.map(([, w]) => w).filter(Boolean))];
  return [
    el("p", {}, "For ", el("b", {}, counted(at, "token")), ` in ${scale.dtype}: `, el("b", { "data-number": "cache", "data-exact": keptBytes(first.kept, at) }, toldBytes(keptBytes(first.kept, at))), " of KV cache",
      fixed ? [" and ", el("b", { "data-number": "state", "data-exact": fixed }, toldBytes(fixed)), " of state (independent of text length)"] : "", "."),
    context ? el("p", {}, `For its context of ${context.toLocaleString("en")} tokens: ${toldBytes(bytes(first, context))}.`) : null,
    same ? el("p", {}, `Attention type: ${same}.`) : null,
    windows.length ? el("p", {}, `Layers with a window cache at most ${windows.map((w) => w.toLocaleString("en")).join(", ")} tokens.`) : null,
    chart({ titled: "KV cache bytes by text length", x: { title: "tokens", log: true, base: 2, low: 128, high, format: (v) => (v >= 1024 ? `${+(v / 1024).toPrecision(4)}k` : String(v)) },
      y: { title: `bytes in ${scale.dtype}`, log: true, base: 2, low: Math.min(...all), high: Math.max(...all) * 1.2, format: toldBytes }, series,
      lines: context ? [{ x: context, name: "context" }] : [], height: 330 }),
    el("ul", {}, variants.slice(1).map((v) => el("li", {}, el("b", {}, v.name), `: ${v.about}. ${toldBytes(bytes(v, at))} for ${counted(at, "token")}, ${bytes(v, at) === bytes(first, at) ? "as much as" : `${significant(bytes(v, at) / bytes(first, at))} times`} this model.`))),
  ].filter(Boolean);
}, true);
