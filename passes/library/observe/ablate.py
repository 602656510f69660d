"""Inputs that scale parts of a model: heads, hidden units, experts, sublayers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from weft.ir import Graph, TensorType, Value, WeftError, ops

from ... import Pass, Trace
from ...analysis.layers import Layers, expand_add_norms
from ...analysis.observed import (
    LayerNodes,
    find_hidden_units,
    find_sublayer,
    has_heads,
    name_values,
    parse_kinds,
    select_layers,
)
from ...analysis.residual import find_streams
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
    the mean of a part over many tokens in place of the part, as in mean ablation.

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
        for kind in kinds or KINDS:
            sites = dict(_find_sites(kind, graph, layers))
            if not sites and kinds:
                raise WeftError(f"ablate: the selected layers of graph {graph.name} have no {kind}: leave it out")
            for name, (values, count) in sites.items():
                for value in values:
                    self._scale(value, name, count, kind != "experts")
                    trace.record_rewrite(self.name, value.name)

    def _scale(self, value: Value, name: str, count: int, has_mean: bool) -> None:
        """Scale `value` [.., features], in place in its readers, by an input with `count` elements."""
        graph, dtype, width = value.graph, value.type.dtype, value.width
        scale = graph.inputs.get(SCALE + name) or graph.add_input(SCALE + name, TensorType(dtype, (count,)))
        assert value.producer is not None
        with graph.inserting(after=value.producer):
            if count in (1, width):
                scaled = value * scale
            else:
                by_head = ops.reshape(value, shape=(*value.shape[:-1], count, width // count))
                scaled = ops.reshape(by_head * ops.unsqueeze(scale, axes=(1,)), shape=value.shape)
            if self.mean and has_mean:
                name = MEAN + name
                scaled = scaled + (graph.inputs.get(name) or graph.add_input(name, TensorType(dtype, (width,))))
        value.replace_uses(scaled, keep=backward_slice([scaled], [value]))

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that outputs are unchanged if scales are 1 and means 0."""
        inputs = equivalence.make_inputs(after)
        old = {name: inputs[name] for name in before.inputs}
        new = {n: np.full_like(x, n.startswith(SCALE)) for n, x in inputs.items() if n not in old}
        equivalence.check_close(equivalence.run(before, old), equivalence.run(after, old | new), EXACT)


def _find_sites(kind: str, graph: Graph, layers: Iterable[LayerNodes]) -> Iterator[tuple[str, tuple[list[Value], int]]]:
    """Yield for every part of `kind` in `layers` its name, the values to scale, and the number of its scales."""
    nodes = [node for layer in layers for node in layer.nodes]
    if kind == "sublayers":
        names = {layer.name for layer in layers}
        written = dict[str, list[Value]]()
        for value in (value for stream in find_streams(graph) for value in stream.writers.values()):
            sublayer = None if value.producer is None else find_sublayer(value.name)
            if sublayer is not None and sublayer.rpartition(".")[0] in names:
                written.setdefault(f"{kind}.{sublayer}", []).append(value)
        yield from ((name, (values, 1)) for name, values in written.items())
    elif kind == "heads":
        mixers = {node: node.output for node in nodes if has_heads(node)}
        yield from ((n, ([v], v.producer.attrs["heads"])) for n, v in name_values(kind, mixers).items() if v.producer)
    else:
        units = (
            {n: find_hidden_units(n) for n in nodes}
            if kind == "neurons"
            else {n: n.operand("combine") for n in nodes if n.op is ops.moe}
        )
        named = name_values(kind, {n: v for n, v in units.items() if v is not None})
        yield from ((name, ([value], value.width)) for name, value in named.items())
