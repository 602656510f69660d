"""The rotations of an attention that one kernel could do: what matches and what does not, in models and one by one."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, Node, TensorType, Value, interpret, ops
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.types import dtypes, sizes
from weft.passes.analysis.rotary import match_ropes
from weft.passes.core.equivalence import EquivalenceCheck, measure_difference

from ..models import weight
from ..zoo import ZOO


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("family/llama-mha-biases", 3),
        ("family/qwen3-gqa", 3),
        ("family/gpt-oss", 3),
        ("packed/family phi3", 3),
        ("cached/family mistral-gqa", 3),
        ("variant/rope, partial and interleaved", 2),
        ("variant/rope, yarn", 2),
        ("variant/rope in every other layer", 2),
        ("variant/local and global", 3),
        ("variant/no positions", 0),
        ("variant/latent", 0),
    ],
)
def test_rotations_of_models(name: str, count: int) -> None:
    pairs = [match_ropes(node) for node in ZOO[name]().nodes if node.op is ops.attention]
    matched = [rope for pair in pairs if not isinstance(pair, str) for rope in pair]
    assert len(matched) == len(set(matched)) == 2 * count and all(rope.op is ops.rope for rope in matched)


def attended(edit: str = "") -> Graph:
    """A causal attention over inputs q, k and v that are rotated by the input at; `edit` spoils one thing."""
    g = Graph("one")
    batch, seq = sizes.sym("batch"), sizes.sym("seq")
    q, k, v = (g.add_input(n, TensorType(dtypes.f32, (batch, seq, w))) for n, w in (("q", 24), ("k", 12), ("v", 12)))
    at, other = (g.add_input(n, TensorType(dtypes.i64, (batch, seq))) for n in ("at", "other"))
    table = weight(g, "frequencies", 3, recipe=RopeFrequencies(6))
    slow = weight(g, "slow", 3, recipe=RopeFrequencies(6, theta=50.0))
    heads, kv_heads = (2, 1) if edit == "heads" else (4, 2)
    q_rope = ops.rope(q, at, table, heads=4, interleaved=edit == "pairs", name="q_rope")
    moved, turned = other if edit == "positions" else at, slow if edit == "frequencies" else table
    k_rope = k if edit == "keys" else ops.rope(k, moved, turned, heads=2, amplitude=1.5 if edit == "amplitude" else 1.0)
    past: list[Value | None] = [None, None, None]
    if edit == "cache":
        shape = (batch, 2, sizes.sym("capacity"), 6)
        past = [*(g.add_input(n, TensorType(dtypes.f32, shape)) for n in ("past_k", "past_v")), other]
    shared = {"heads": heads, "kv_heads": kv_heads, "causal": True}
    latent = {"value_dim": 5} if edit == "latent" else {}
    y, *_ = ops.attention.emit(q_rope, k_rope, None if latent else v, None, None, None, *past, **shared, **latent)
    g.add_output("y", y)
    return g


REASONS = {
    "pairs": "with interleaved True and False",
    "positions": "different positions or frequencies",
    "frequencies": "different positions or frequencies",
    "amplitude": "with amplitude 1.0 and 1.5",
    "heads": "other heads than the rotations",
    "keys": "only its queries are rotated",
    "latent": "its values are part of the rotated keys",
    "cache": "its cache is written at other positions",
}


def attention_of(graph: Graph) -> Node:
    (node,) = (n for n in graph.nodes if n.op is ops.attention)
    return node


@pytest.mark.parametrize("edit", REASONS)
def test_refusals(edit: str) -> None:
    found = match_ropes(attention_of(attended(edit)))
    assert isinstance(found, str) and REASONS[edit] in found


def test_equal_rotations_match() -> None:
    graph = attended()
    assert match_ropes(attention_of(graph)) == tuple(n for n in graph.nodes if n.op is ops.rope)


@pytest.mark.parametrize("edit", ["pairs", "positions", "frequencies", "amplitude", "heads", "keys"])
def test_each_refusal_is_needed(edit: str) -> None:
    """Turning keys as the queries are turned, or as the attention counts heads, gives other numbers."""
    graph = attended(edit)
    inputs = {
        **EquivalenceCheck().make_inputs(graph),
        "at": np.arange(15).reshape(3, 5),
        "other": np.arange(15).reshape(3, 5) * 3,
    }
    heads = {name: attention_of(graph).attrs[name] for name in ("heads", "kv_heads")}
    (q_rope,) = graph.inputs["q"].users
    pairs = {"interleaved": q_rope.attrs["interleaved"]}
    q, k = (
        ops.rope.reference(inputs[name], inputs["at"], RopeFrequencies(6).frequencies(), heads=count, **pairs)
        for name, count in zip("qk", heads.values(), strict=True)
    )
    wrong = ops.attention.reference(q, k, inputs["v"], causal=True, **heads)
    assert measure_difference(interpret(graph, inputs)["y"], wrong) > 0.01
