"""fuse-norm-linear fires on every norm → linear where it is exact, and on no other: counted by the structure alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weft.ir import Graph, Node, Param, Value, ops
from weft.passes import Trace
from weft.passes.library.fuse.fuse_norm_linear import FuseNormLinear

from ...zoo import TRIED, ZOO

NORMS = ("rms_norm", "layer_norm", "add_norm")
# Three layers of tiny models, counted by hand.
BY_HAND = {
    "family/llama-gqa-tied": 3 * (3 + 2),  # q, k, v and gate, up; the head's weight is the embedding
    "family/llama-odd-head": 3 * (3 + 2) + 1,
    "family/qwen3-gqa": 3 * (3 + 2) + 1,  # not the norms of q and k
    "family/gpt2-tied": 3 * (3 + 1),
    "family/gpt2-untied": 3 * (3 + 1) + 1,
    "family/gpt_neox": 3 * (3 + 1) + 1,  # two norms side by side
    "family/phi": 3 * (3 + 1) + 1,  # q, k, v and up behind one norm
    "family/olmo2-gqa": 1,  # norms stand behind the sublayers, but for the last
    "family/gemma2": 3 * (3 + 2),
    "family/mixtral": 3 * 3 + 1,  # experts read the norm of the feed-forward in its own right
    "family/bert": 0,  # a norm's result is also the residual
    "family/opt-post": 1,  # the head behind the last of them
    "family/t5": 3 * (3 + 1) + 2 * (3 + 1 + 1) + 2 * 2,  # behind the encoder's last norm k and v of both decoder layers
    "packed/family llama-mha-biases": 3 * (1 + 1) + 1,
    "packed/family qwen3-gqa": 3 * (1 + 1) + 1,
    "packed/family gpt2-tied": 3 * (1 + 1),
}


def edges(graph: Graph) -> int:
    """Linears behind norms that nothing else reads, whose weights are read by nothing that stays as it is; norms of
    parameters are made once."""
    norms = [n for n in graph.nodes if n.op.name in NORMS and not isinstance(n.inputs[0], Param)]
    groups = {norm: readers for norm in norms if (readers := alone(norm.output))}
    while stuck := [norm for norm, readers in groups.items() if changes(norm) and shared(norm, readers, groups)]:
        for norm in stuck:
            del groups[norm]
    return sum(map(len, groups.values()))


def alone(normed: Value) -> list[Node]:
    """The readers of `normed`, if they are linears of it."""
    fits = all(n.op is ops.linear and i == 0 and isinstance(n.inputs[1], Param) for n, i in normed.uses)
    return list(normed.users) if fits and not normed.is_output else []


def vectors(norm: Node) -> tuple[Value | None, ...]:
    return tuple(norm.operand(name) if norm.op is not ops.rms_norm or name == "weight" else None for name in PARAMETERS)


PARAMETERS = ("weight", "bias")


def changes(norm: Node) -> bool:
    """Check that weights after `norm` must change: not after an RMSNorm without a weight."""
    return norm.op is ops.layer_norm or norm.attrs.get("kind") == "layer" or any(vectors(norm))


def shared(norm: Node, readers: list[Node], groups: dict[Node, list[Node]]) -> bool:
    """Check that those weights have a reader that does not follow an equal norm."""
    alike = {reader for other, behind in groups.items() if vectors(other) == vectors(norm) for reader in behind}
    return any(p.is_output or not set(p.users) <= alike for p in parameters(readers))


def parameters(readers: list[Node]) -> Iterator[Value]:
    return (v for reader in readers for v in reader.inputs[1:] if v is not None)


@pytest.mark.parametrize("name", TRIED)
def test_every_linear_after_a_norm_is_fused_where_exact(name: str) -> None:
    graph, trace = ZOO[name](), Trace()
    expected = edges(graph)
    FuseNormLinear().run(graph, trace)
    assert trace.rewrites.total() == expected
    assert sum(node.op is ops.norm_linear for node in graph.nodes) >= expected
    assert BY_HAND.get(name, expected) == expected
    assert edges(graph) == 0


def test_graphs_counted_by_hand_are_in_the_zoo() -> None:
    assert set(BY_HAND) <= set(ZOO)
