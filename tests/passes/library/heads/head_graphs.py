"""Graphs with heads of many kinds, and checks of passes that change heads."""

from __future__ import annotations

from weft.ir import Graph, ops
from weft.ir.recipes import Take
from weft.passes import Trace
from weft.passes.core.equivalence import EXACT

from ...models import applied, worst
from ...zoo import ZOO

GRAPHS = (
    *("family/olmo2-gqa", "family/qwen3-gqa", "family/gemma3", "family/gpt-oss", "family/starcoder2"),
    *("family/albert", "family/bart", "family/olmo-clipped", "family/mpt", "variant/norms of q and k, each"),
    *("variant/norms of q and k, no weights", "variant/rope, partial and interleaved", "variant/ALiBi, biases"),
    *("variant/T5 bias, shared", "variant/repeated", "variant/encoder-decoder", "packed/family phi3"),
    *("packed/variant repeated", "packed/quantized gguf"),
)


def attentions(graph: Graph) -> list[dict[str, object]]:
    return [n.attrs for n in graph.nodes if n.op is ops.attention]


def check_exact_and_idempotent(before: Graph, pipeline: str) -> Graph:
    """Check that `pipeline` keeps the outputs of `before` and changes nothing when run again; return its result."""
    after = applied(pipeline, before)
    assert worst(before, after) <= EXACT
    assert str(applied(pipeline, after)) == str(after)
    return after


def check_refused(pipeline: str, name: str, reason: str) -> None:
    """Check that `pipeline` leaves the graph `name` of the zoo alone and gives `reason` for every refusal."""
    graph, trace = ZOO[name](), Trace()
    assert str(applied(pipeline, graph, trace)) == str(graph)
    assert trace.refusals and all(reason in refused.reason for refused in trace.refusals)


def rows_taken(graph: Graph, name: str, heads: tuple[int, ...], axis: int = 0, width: int = 4) -> None:
    """Put the heads of the parameter `name` in another order, by hand."""
    param = graph.params[name]
    index = tuple(h * width + i for h in heads for i in range(width))
    shape = list(param.shape)
    shape[axis] = len(index)
    param.recipe, param.type = Take(param.recipe, index, axis), param.type.with_shape(*shape)
