"""Every form of `VisibleKeys` hides the same keys as a definition written out here."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from weft.backends.torch.kernels.shared.cached_keys import CacheMask
from weft.backends.torch.ops.masks import write_visibility
from weft.ir import Graph, TensorType, WeftError, dtypes, interpret, ops
from weft.ir.schema.visible_keys import PATTERNS, VisibleKeys
from weft.ir.testing import expand_bodies
from weft.ir.types import sizes

from ...masks import SETTINGS, sees

TOKENS = 19
RULES = [
    VisibleKeys(causal, window, keep_first, pattern, stride, summary)
    for causal, window, keep_first, pattern, (stride, summary) in itertools.product(
        (True, False), (None, 1, 4), (0, 2), PATTERNS, ((1, 1), (5, 2))
    )
]


def definition(rule: VisibleKeys) -> np.ndarray:
    return np.array([[sees(i, j, **asdict(rule)) for j in range(TOKENS)] for i in range(TOKENS)])


def attention(rule: VisibleKeys) -> Graph:
    """An attention whose values are the rows of the identity: its outputs are its weights."""
    graph = Graph()
    q, k = (graph.add_input(name, TensorType(dtypes.f32, (1, TOKENS, 4))) for name in "qk")
    v = graph.add_input("v", TensorType(dtypes.f32, (1, TOKENS, TOKENS)))
    attrs = {name: getattr(rule, name) for name in ("causal", "window", "keep_first", "pattern", "stride", "summary")}
    graph.add_output("y", ops.attention(q, k, v, heads=1, kv_heads=1, **attrs))
    return graph


def test_every_pattern_is_tried() -> None:
    assert {settings.get("pattern", "dense") for settings in SETTINGS.values()} == {*PATTERNS}


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_all_forms_agree(rule: VisibleKeys) -> None:
    want = definition(rule)
    at = np.arange(TOKENS)
    np.testing.assert_array_equal(rule.mask(at[:, None], at[None]), want)
    graph = attention(rule)
    (node,) = graph.nodes
    text = write_visibility(node)
    q, k = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
    found = eval(text.format("q", "k"), {"q": q, "k": k}) if text else torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    np.testing.assert_array_equal(found.numpy(), want)
    feeds = {"q": np.zeros((1, TOKENS, 4)), "k": np.zeros((1, TOKENS, 4)), "v": np.eye(TOKENS)[None]}
    for form in (graph, _expanded(graph)):
        weights = interpret(form, feeds)["y"][0]
        np.testing.assert_array_equal(weights > 0, want)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_properties_of_every_pattern(pattern: str, window: int | None, causal: bool) -> None:
    """`VisibleKeys` says who relies on it."""
    rule = VisibleKeys(causal, window, 0, pattern, 5, 2)
    query, key = np.arange(TOKENS)[:, None], np.arange(TOKENS)[None]
    assert all(np.shape(condition) == (TOKENS, TOKENS) for condition in rule.conditions(query, key))
    seen = rule.mask(query, key)
    assert seen.diagonal().all(), "a query does not see its own position"
    np.testing.assert_array_equal(rule.mask(query + 5, key + 5), seen, "a pattern does not repeat by its stride")


def _expanded(graph: Graph) -> Graph:
    copy = graph.clone()
    (node,) = copy.nodes
    with copy.inserting(before=node):
        copy.replace(node, *node.op.expand(node))
    return copy


IN_KERNELS = [  # a decode step leaves others to torch
    rule
    for rule in RULES
    if rule.causal
    and rule.pattern in ("dense", "dilated", "chunked")
    and (not rule.keep_first or (rule.pattern == "dense" and rule.window is not None))
]


@pytest.mark.parametrize("rule", IN_KERNELS, ids=str)
def test_kernels_mask_their_slots_alike(rule: VisibleKeys) -> None:
    """The kernels of decode steps know windows, chunks and every n-th key, of a cache whose slots are positions."""
    chunk = rule.stride if rule.pattern == "chunked" else None
    step = rule.stride if rule.pattern == "dilated" else 1
    mask = CacheMask(TOKENS, rule.window, rule.keep_first, False, chunk, step)
    found, _ = mask.visible(torch.arange(TOKENS))
    np.testing.assert_array_equal(found.numpy(), definition(rule))
    assert definition(rule).sum(1).max() <= mask.reach


RNG = np.random.default_rng(8)
HEADS, KV_HEADS, D, DV = 4, 2, 3, 5


def by_query(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, **a: Any) -> np.ndarray:
    """The formula: for each query the list of its keys, a key of the first blocks several times in it."""
    batch, length, _ = q.shape
    block, sides, first, last = (a[name] for name in ("block", "sides", "first", "last"))
    blocks = (length + block - 1) // block
    out = np.zeros((batch, length, HEADS * DV))
    for i in range(length):
        own = i // block
        seen: list[int] = []
        for j in range(length):
            there = j // block
            if length <= a["dense"] or own < first or own >= blocks - last:
                seen += [j]
            elif there < first:
                seen += [j] * a["first_weight"]
            elif there >= blocks - last or own - sides <= there <= own + sides:
                seen += [j]
        for b in range(batch):
            keys = [j for j in seen if mask[b, j]]
            for h in range(HEADS if keys else 0):
                group = h * KV_HEADS // HEADS
                scores = np.array([q[b, i, h * D : h * D + D] @ k[b, j, group * D : group * D + D] for j in keys])
                weights = np.exp(scores / D**0.5)
                values = np.stack([v[b, j, group * DV : group * DV + DV] for j in keys])
                out[b, i, h * DV : h * DV + DV] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 14, 15, 16, 17, 26])
@pytest.mark.parametrize(
    "attrs",
    [
        {"block": 4},
        {"block": 2, "first_weight": 3, "dense": 14},
        {"block": 3, "sides": 0, "first": 2, "last": 0, "first_weight": 2},
        {"block": 2, "sides": 2, "first": 0, "last": 3},
        {"block": 1, "sides": 3, "first": 0, "last": 0, "dense": 3},
    ],
    ids=str,
)
def test_every_query_by_itself(attrs: dict[str, int], length: int) -> None:
    full = {"sides": 1, "first": 1, "last": 1, "first_weight": 1, "dense": 0} | attrs
    q, k, v = (RNG.standard_normal((2, length, n)) for n in (HEADS * D, KV_HEADS * D, KV_HEADS * DV))
    mask = np.stack([np.ones(length, bool), RNG.random(length) < 0.5])
    wanted = by_query(q, k, v, mask, **full)
    heads = {"heads": HEADS, "kv_heads": KV_HEADS}
    found = ops.block_sparse_attention.reference(q, k, v, mask, **heads, **attrs)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)

    # One graph, in simpler ops, for all lengths.
    graph = symbolic(attrs)
    expand_bodies(graph)
    made = interpret(graph, {"q": q, "k": k, "v": v, "mask": mask.astype(np.int64)})["y"]
    np.testing.assert_allclose(made, wanted, rtol=1e-12, atol=1e-14)


def symbolic(attrs: dict[str, int]) -> Graph:
    """The op on texts of any length."""
    graph, rows = Graph("blocks"), (sizes.sym("batch"), sizes.sym("seq"))
    widths = {"q": HEADS * D, "k": KV_HEADS * D, "v": KV_HEADS * DV}
    qkv = [graph.add_input(name, TensorType(dtypes.f32, (*rows, width))) for name, width in widths.items()]
    mask = graph.add_input("mask", TensorType(dtypes.i64, rows))
    y = ops.block_sparse_attention(*qkv, mask, heads=HEADS, kv_heads=KV_HEADS, **attrs)
    graph.add_output("y", y)
    return graph


def test_cost_is_linear_in_the_length() -> None:
    graph = symbolic({"block": 64, "dense": 704})
    (node,) = graph.nodes
    cost = node.op.cost_of([v and v.type for v in node.inputs], [node.output.type], node.attrs)
    flops = [sizes.evaluate(cost.flops, {"batch": 1, "seq": n}) for n in (352, 704, 4096, 8192)]
    pair = HEADS * ((D + DV) * 2 + 5)
    assert flops[:2] == [352**2 * pair, 704**2 * pair]
    assert flops[2] == 4096 * (5 + 2) * 64 * pair and flops[3] == 2 * flops[2]


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"block": 0}, "block=0 must be at least 1"),
        ({"block": 4, "sides": -1}, "sides=-1 must be at least 0"),
        ({"block": 4, "first": 0, "first_weight": 2}, "first_weight=2 is for first blocks, and first=0"),
    ],
)
def test_attributes_that_do_not_fit(attrs: dict[str, int], message: str) -> None:
    with pytest.raises(WeftError, match=f"block_sparse_attention: {message}"):
        symbolic(attrs)


def test_keys_of_another_sequence_are_refused() -> None:
    graph = Graph("blocks")
    q, k = (graph.add_input(name, TensorType(dtypes.f32, (1, n, 8))) for name, n in (("q", 8), ("k", 9)))
    with pytest.raises(WeftError, match="must be equally long: blocks are those of one sequence"):
        ops.block_sparse_attention(q, k, k, heads=2, kv_heads=2, block=4)
