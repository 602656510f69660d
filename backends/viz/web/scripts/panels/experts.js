// The page about experts: routing of example tokens, and the number of idle parameters.
if (DATA.panels?.experts) tab("experts", "Experts", () => DATA.panels.experts.flatMap((rule) => {
  const across = Math.min(32, rule.groups > 1 ? rule.experts / rule.groups : Math.ceil(Math.sqrt(rule.experts * 2))), rows = Math.ceil(rule.experts / across);
  const parts = [head(`${rule.experts} experts: ${rule.where}`), ...rule.sentences.map((text) => el("p", {}, text)),
    el("p", {}, `${told(rule.parameters)} parameters in the experts of ${counted(rule.layers, "layer")}` + (rule.idle ? `; ${told(rule.idle)} of them, ${share(rule.idle, rule.parameters)}, are idle for a token.` : "."))];
  if (rule.examples.length) {
    const box = el("div", {}), slider = el("input", { type: "range", min: 0, max: rule.examples.length - 1, value: 0, "aria-label": "Example", oninput: () => show(+slider.value) });
    const show = (i) => {
      const chosenHere = new Map(rule.examples[i]);
      const [svg, told] = squares({ titled: `Experts chosen for an example: ${[...chosenHere.keys()].join(", ")}`, rows, columns: across, size: Math.min(24, Math.floor(tabRoom() / across) - 3), gap: 3,
        value: (r, c) => (r * across + c >= rule.experts ? "ghost" : chosenHere.has(r * across + c) ? "kept" : undefined),
        say: (r, c) => { const e = r * across + c; return e < rule.experts ? `expert ${e}${rule.groups > 1 ? ` of group ${Math.floor(e / (rule.experts / rule.groups))}` : ""}: ${chosenHere.has(e) ? `weight ${chosenHere.get(e)}` : "idle"}` : ""; } });
      box.replaceChildren(svg, told, el("p", {}, `Chosen: ${rule.examples[i].map(([e, w]) => `${e} (${w})`).join(", ")}`));
    };
    show(0);
    parts.push(el("p", {}, el("small", {}, "Experts selected for tokens with random scores", rule.groups > 1 ? "; a row is a group" : "", ":")), box, el("div", { class: "choices" }, slider, el("span", {}, "another token")));
  }
  return [...parts, el("p", {}, link(rule.at, "Show in the picture"))];
}), true);
