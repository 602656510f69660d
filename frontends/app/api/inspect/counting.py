"""Counts of a model before it is compiled: parameters, FLOPs, cache bytes, a line per distinct block."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.backends.viz.model.labels import label_part
from weft.backends.viz.model.network import build_network
from weft.backends.viz.model.outline import PicturePart, build_outline
from weft.backends.viz.model.part_costs import sum_costs
from weft.ir import Graph, Node, Param
from weft.ir.errors import WeftError
from weft.ir.graph.analysis import hash_structure, select_explicit_attributes, sum_node_costs
from weft.ir.graph.step import Step
from weft.ir.op import Op, Trait
from weft.ir.recipes.spelling import spell
from weft.ir.types import sizes
from weft.passes.analysis import costs
from weft.passes.analysis.recurrences.formulas import write_formulas

from ....model import SourceLike
from ....models.left_out import explain_tensor
from ..source.sources import load_source
from .dimensions import find_dimensions
from .inspection import CACHE_DTYPES, Inspection, RepeatedPart

OTHER = "other"
DEFAULT_TOKENS = 512  # tokens
# modules of ops whose attributes hardly characterize a block
_PLAIN = {"tensor", "elementwise", "reduce", "products", "norm", "rotary"}


def inspect(source: SourceLike, tokens: int | None = None) -> Inspection:
    """Return parameters, caches and FLOPs of a model for `tokens` tokens (by default 512, or the context if shorter).

    `source` is anything that `load_source` accepts: ``inspect("llama3.1-8b")``, ``inspect("model.gguf")``,
    ``inspect(Decoder(...))``. Nothing is compiled, and no weight is read.

    Raises:
        WeftError: if `tokens` < 1, the source cannot be read, or its graph has symbolic sizes other than batch and seq.
    """
    if tokens is not None and tokens < 1:
        raise WeftError(f"tokens={tokens} must be positive")
    model = load_source(source)
    graph = model.graph
    context = graph.meta.get("context")
    n = tokens or choose_tokens(graph)
    binding = {"batch": 1, "seq": n, "past": 0, "total": n, "capacity": n, "source": n, **costs.AUDIO_SIZES}
    prefill = sizes.evaluate(sum_node_costs(graph.nodes).flops, binding)
    parts = _group_nodes(graph)
    parameters = _count_parameters(graph, parts)
    folded: dict[Any, list[str]] = {}
    for scope, nodes in parts.items():
        folded.setdefault(hash_structure(nodes) if _is_layer(scope) else scope, []).append(scope)
    blocks = tuple(_count_block(s, parts[s[0]], parameters.get(s[0], 0), binding) for s in folded.values())
    caches = costs.find_cache_sizes(graph.nodes)
    decoder = graph.meta.get("kind") in ("decoder", "encoder-decoder")
    context_cache = (
        sum(width * min(window or context, context) for width, window in caches) if decoder and context else None
    )
    return Inspection(
        source=model.description,
        kind=str(graph.meta.get("kind", "model")),
        task=graph.meta.get("task"),
        model_type=graph.meta.get("model_type"),
        vocab=graph.meta.get("vocab"),
        context=context,
        parameters=costs.count_parameters(graph),
        active_parameters=costs.count_active_parameters(graph),
        parameters_by_storage=_count_by_dtype(graph),
        tokens=n,
        flops_per_token=prefill // n,
        flops_prefill=prefill,
        cache_per_token=sum(width for width, _ in caches) if decoder else None,
        cache_at_context=context_cache,
        cache_per_source_token=costs.count_cross_cache(graph.nodes) or None,
        state_bytes={d: costs.count_state_bytes(graph.nodes, b) for d, b in CACHE_DTYPES.items()} if decoder else None,
        layers=_count_layers([scope for block in blocks for scope in block.scopes if _is_layer(scope)]),
        dimensions=find_dimensions(graph),
        blocks=blocks,
        unread=tuple(model.unread),
        ignored=tuple(f"{key}: {explain_tensor(key)}" for key in model.ignored),
        left_out=tuple(map(str, model.left_out)),
        random=model.random_init,
    )


def choose_tokens(graph: Graph) -> int:
    """Return the default number of tokens to count: 512, or the context if shorter."""
    return min(DEFAULT_TOKENS, graph.meta.get("context") or DEFAULT_TOKENS)


def find_layer(scope: str) -> str:
    """Return the scope up to its first number ("layers.3" of "layers.3.attn"), else its first component."""
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", scope)
    return numbered.group() if numbered else scope.partition(".")[0]


def _is_layer(part: str) -> bool:
    return part.rpartition(".")[2].isdigit()


def _count_layers(parts: list[str]) -> int:
    """Return how many of `parts` (numbered scopes) are in a list called layers; if none is, the number of all."""
    layers = [part for part in parts if f".{part}".rpartition(".")[0].endswith(".layers")]
    return len(layers or parts)


def _group_nodes(graph: Graph) -> dict[str, list[Node]]:
    """Return the nodes of `graph` keyed by layer ("layers.3"), outside of layers by the first component of their scope.

    Nodes without a scope are grouped by output name if they read a parameter, else under `OTHER`, which is last.
    """
    groups: dict[str, list[Node]] = {}
    for node in graph.nodes:
        reads = node.scope or any(isinstance(v, Param) for v in node.inputs)
        groups.setdefault(find_layer(node.scope or node.output.name) if reads else OTHER, []).append(node)
    if OTHER in groups:
        groups[OTHER] = groups.pop(OTHER)  # last
    return groups


def _count_parameters(graph: Graph, parts: Mapping[str, Iterable[Node]]) -> dict[str, int]:
    """Return the number of learned elements keyed by part; a parameter belongs to the first part that reads it."""
    unseen, counts = set(costs.find_learned_params(graph)), dict[str, int]()
    for part, nodes in parts.items():
        params = {v for node in nodes for v in node.inputs if isinstance(v, Param)} & unseen
        counts[part] = sum(map(costs.count_elements, params))
        unseen -= params
    return dict(counts)


def _count_by_dtype(graph: Graph) -> dict[str, int]:
    """Return the number of learned elements keyed by dtype: the checkpoint tensor's, else the declared one."""
    counts = Counter[str]()
    for p in costs.find_learned_params(graph):
        keys = list(dict.fromkeys(p.recipe.sources()))
        counts[graph.reader.dtype(keys[0]).name if keys else p.type.dtype.name] += costs.count_elements(p)
    return dict(counts)


def _count_block(scopes: list[str], nodes: list[Node], parameters: int, binding: Mapping[str, int]) -> RepeatedPart:
    flops = sizes.evaluate(sum_node_costs(nodes).flops, binding) // binding["seq"]
    cache = sum(width for width, _ in costs.find_cache_sizes(nodes))
    return RepeatedPart(tuple(scopes), parameters, flops, cache, tuple(_describe_ops(nodes)))


def _describe_ops(nodes: Iterable[Node]) -> Iterable[str]:
    """Yield each distinct op except views, with its explicit attributes and its number if above 1: "2 gelu(…)"."""
    counts = Counter(_format_op(n.op, select_explicit_attributes(n)) for n in nodes if Trait.VIEW not in n.op.traits)
    for text, times in counts.items():
        yield f"{times} {text}" if times > 1 else text


def _format_op(op: Op, attrs: Mapping[str, Any]) -> str:
    if op.module.rpartition(".")[2] in _PLAIN or not attrs:
        return op.name
    texts = (
        "; ".join(write_formulas(v)) if isinstance(v, Step) else k if v is True else f"{k}={spell(v)}"
        for k, v in attrs.items()
    )
    return f"{op.name}({', '.join(texts)})"


@dataclass(frozen=True)
class PartCost:
    """The costs of a part of the picture: of the model, of a layer, or of a run of equal layers.

    path: name, such as "layers.0-31" for a run. times: number of equal layers; all values are sums over them.
    flops, read, written: operations and bytes of one forward pass over all tokens.
    step_flops, step_read, step_written: the same for one decode step at the last token; None without generation.
    cache, state: bytes of KV caches and recurrent states after all tokens.
    """

    path: str
    title: str
    times: int
    parameters: int
    flops: int
    read: int
    written: int
    step_flops: int | None
    step_read: int | None
    step_written: int | None
    cache: int
    state: int


def compute_part_costs(graph: Graph, tokens: int, item: int) -> tuple[PartCost, ...]:
    """Return the costs of `graph` for `tokens` tokens and `item` bytes per value: the entire model, then its parts."""
    root = build_outline(build_network(graph))
    totals = sum_costs(root)
    no_steps = {} if totals.cache or any(totals.state) else dict.fromkeys(("step_flops", "step_read", "step_written"))
    costs = []
    for part, times in [(root, 1), *_list_parts(root, 1)]:
        values: dict[str, Any] = sum_costs(part).to_dict(tokens, item) | no_steps
        costs.append(PartCost(part.path, label_part(part).title, times, **values))
    return tuple(costs)


def _list_parts(part: PicturePart, times: int) -> Iterator[tuple[PicturePart, int]]:
    """Yield (part, occurrences) for the parts in `part` except inputs and outputs, recursively in parts with layers."""
    for child in part.body.children:
        if not child.vertices or child.vertices[0].op not in ("input", "output"):
            yield child, times * child.count
            if child.has_layers:
                yield from _list_parts(child, times * child.count)
