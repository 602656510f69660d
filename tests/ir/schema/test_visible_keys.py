"""Every form of `VisibleKeys` hides the same keys as a definition written out here."""

from __future__ import annotations

import itertools
from dataclasses import asdict

import numpy as np
import pytest
import torch

from weft.backends.torch.kernels.shared.cached_keys import CacheMask
from weft.backends.torch.ops.masks import write_visibility
from weft.ir import TensorType, dtypes, interpret, ops
from weft.ir.graph import Graph
from weft.ir.schema.visible_keys import PATTERNS, VisibleKeys

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
