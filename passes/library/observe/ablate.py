"""Inputs that scale parts of a model: heads, hidden units, experts, sublayers."""

from __future__ import annotations

import numpy as np

from weft.ir import Graph, TensorType, WeftError, ops

from ... import Pass, Trace
from ...analysis.layers import Layers, expand_add_norms
from ...analysis.observed import PartSite, find_sites, parse_kinds, select_layers
from ...core.equivalence import EXACT, EquivalenceCheck
from ...edits.edit import backward_slice

KINDS = ("heads", "neurons", "experts", "sublayers")
SCALE, MEAN = "scale.", "mean."  # prefixes of the new inputs


class Ablate(Pass):
    """Add inputs that scale parts of the model, so that a run can leave a part out: 1 keeps it, 0 removes it.

    Kinds are listed by name; "all" means every kind of the model. `layers` selects layers by their number, an encoder's
    before its decoder's.

    - heads: scale.heads.layers.3.attn [heads] scales the result of each head, before the output projection.
    - neurons: scale.neurons.layers.3.ffn [hidden] scales the hidden units of a feed-forward.
    - experts: scale.experts.layers.3.ffn [experts] scales the weight of every expert in the output of a mixture.
    - sublayers: scale.sublayers.layers.3.attn [1] scales the term that an attention, a feed-forward or a recurrence
      adds to the residual stream.

    With `mean`, an input mean.heads.layers.3.attn, one number per feature, is added after scaling (not for experts):
    the mean of a part over many tokens in place of the part, as in mean ablation. The pass expose, with the same kinds,
    returns the values to take means of.

    Condition: the new scales are 1 and the new means 0; then outputs are unchanged.

    Source: Michel 2019, Are Sixteen Heads Really Better than One? (arXiv 1905.10650), whose gates these are; Wang 2022
    (arXiv 2211.00593) for means.

    Example ablate, on the graph of expose.
    """

    name = "ablate"
    effect = "conditional"
    purpose = "Look inside"
    idempotent = False
    see = ("expose", "prune-heads", "prune-layers")
    tradeoff = "a product per part; in return parts can be left out without compiling again"
    what: str = "all"
    layers: Layers = "all"
    mean: bool = False

    def run(self, graph: Graph, trace: Trace) -> None:
        expand_add_norms(graph)
        kinds = parse_kinds(self.what, KINDS, self.name)
        if already := [name for name in graph.inputs if name.startswith(SCALE)]:
            raise WeftError(f"ablate: graph {graph.name} has the input {already[0]} already: run ablate once")
        layers = select_layers(graph, self.layers, self.name)
        for kind in dict.fromkeys(kind for name in kinds for kind in (KINDS if name == "all" else (name,))):
            sites = find_sites(kind, graph, layers)
            if not sites and kind in kinds:
                raise WeftError(f"ablate: the selected layers of graph {graph.name} have no {kind}: leave it out")
            for site in sites:
                self._scale(site, self.mean and kind != "experts")
                trace.record_rewrite(self.name, site.value.name)

    def _scale(self, site: PartSite, has_mean: bool) -> None:
        """Scale the value [.., features] of `site`, in place in its readers, by an input."""
        value, count = site.value, site.count
        graph, dtype, width = value.graph, value.type.dtype, value.width
        name = SCALE + site.part
        scale = graph.inputs.get(name) or graph.add_input(name, TensorType(dtype, (count,)))
        assert value.producer is not None
        with graph.inserting(after=value.producer):
            if count in (1, width):
                scaled = value * scale
            else:
                by_head = ops.reshape(value, shape=(*value.shape[:-1], count, width // count))
                scaled = ops.reshape(by_head * ops.unsqueeze(scale, axes=(1,)), shape=value.shape)
            if has_mean:
                scaled = scaled + graph.add_input(MEAN + site.name, TensorType(dtype, (width,)))
        value.replace_uses(scaled, keep=backward_slice([scaled], [value]))

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that outputs are unchanged if scales are 1 and means 0."""
        inputs = equivalence.make_inputs(after)
        old = {name: inputs[name] for name in before.inputs}
        new = {n: np.full_like(x, n.startswith(SCALE)) for n, x in inputs.items() if n not in old}
        equivalence.check_close(equivalence.run(before, old), equivalence.run(after, old | new), EXACT)
