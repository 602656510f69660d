"""Rolling caches on both CPU targets, in place, against a formula over the whole text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.ir import Graph, TensorType, Value, ops
from weft.ir.recipes import Source
from weft.ir.types import dtypes
from weft.passes import Trace, run_passes
from weft.passes.core.equivalence import EquivalenceCheck
from weft.passes.library.cache.rolling_buffer import RollingBuffer

from .attention_models import HEADS, Decoding, decoder, draw, formula

ROLL = "kv-cache, rolling-buffer"
TARGETS = ("onnx", "ort-cpu")
CUTS = [(30,), (1,) * 30, (20, 1, 1, 1, 7), (3,) * 10, (8, 8, 8, 6), (5, 19, 1, 5), (9, 1, 20)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("slack", [0, 3])
def test_rolling_cache_equals_a_full_pass_for_any_call_lengths(target: str, cuts: tuple[int, ...], slack: int) -> None:
    graph = decoder(window=8)
    decoding = Decoding(graph, target, 1, 0, f"kv-cache, rolling-buffer{{slack={slack}}}")
    assert {c.shape[2] for c in decoding.caches.values()} == {8 + slack}
    assert ("GroupQueryAttention" in decoding.ops) == (target == "ort-cpu")
    inputs = draw(np.random.default_rng(0), graph, 1, 30)
    wanted = formula(inputs, lambda i, j: i - j < 8)
    np.testing.assert_allclose(decoding.chunks(inputs, cuts), wanted, atol=3e-6)


SLOPES = np.linspace(0.1, 0.4, HEADS)


def by_key(graph: Graph, q: Value) -> Value:
    """Return a slope per head times the position of the key: [1, heads, 1, keys]."""
    graph.reader.arrays["slopes"] = SLOPES.reshape(1, HEADS, 1, 1)
    slopes = graph.add_param("slopes", TensorType(dtypes.f32, (1, HEADS, 1, 1)), Source("slopes"))
    return ops.mul(slopes, ops.cast(ops.iota(q, axis=1), to=dtypes.f32))


VARIANTS: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": np.linspace(-1, 1, HEADS)},
    "softcap": {"softcap": 2.0},
    "dilated": {"pattern": "dilated", "stride": 3},
    "latent": {"v": False, "kv_heads": 1, "value_dim": 5},
    "biased": {"bias": SLOPES[:, None, None] * np.arange(30)},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cuts", [CUTS[1], CUTS[5]], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_variants_roll(target: str, cuts: tuple[int, ...], variant: str) -> None:
    options = VARIANTS[variant]
    graph = decoder(window=8, **{**options, "bias": by_key if "bias" in options else None})
    decoding = Decoding(graph, target, 1, 0, ROLL)
    assert ("Softmax" in decoding.ops) == (variant == "biased")  # the body
    inputs = draw(np.random.default_rng(0), graph, 1, 30)
    stride = options.get("stride", 1)
    same = {k: v for k, v in options.items() if k not in ("v", "pattern", "stride")}
    wanted = formula(inputs, lambda i, j: (i - j < 8) & ((i - j) % stride == 0), **same)
    np.testing.assert_allclose(decoding.chunks(inputs, cuts), wanted, atol=3e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_batch_rows_continue_independently(target: str) -> None:
    """Prompts of unequal lengths, each alone; then steps of all rows under a mask of the maximum length."""
    graph, lengths, steps = decoder(window=8), np.array([20, 3, 8, 9]), 12
    decoding = Decoding(graph, target, 4, 0, ROLL)
    inputs = draw(np.random.default_rng(0), graph, 4, 32)
    wanted = formula(inputs, lambda i, j: i - j < 8)
    for row, n in enumerate(lengths):
        one = slice(row, row + 1)
        y = decoding.call({k: v[one, :n] for k, v in inputs.items()}, np.arange(n)[None], np.ones((1, n)), one)
        np.testing.assert_allclose(y[0], wanted[row, :n], atol=3e-6)
    rows = np.arange(4)
    for _ in range(steps):
        mask = np.arange(40) <= lengths[:, None]
        y = decoding.call({k: v[rows, lengths][:, None] for k, v in inputs.items()}, lengths[:, None], mask)
        np.testing.assert_allclose(y[:, 0], wanted[rows, lengths], atol=3e-6)
        lengths = lengths + 1


def test_standard_operators_allow_padded_rows_and_repeated_steps() -> None:
    graph, lengths = decoder(window=8), np.array([13, 3, 8])
    decoding = Decoding(graph, "onnx", 3, 0, ROLL)
    inputs = draw(np.random.default_rng(0), graph, 3, 32)
    wanted = formula(inputs, lambda i, j: i - j < 8)
    start, rows = np.zeros(3, int), np.arange(3)
    for parts in (lengths, np.array([2, 11, 5]), np.array([9, 1, 4]), *[np.ones(3, int)] * 6):
        at = start[:, None] + np.arange(parts.max())
        mask = np.arange(at.max() + 1) < (start + parts)[:, None]
        call = {k: v[rows[:, None], at] for k, v in inputs.items()}
        for _ in range(2 if parts.max() == 1 else 1):
            y = decoding.call(call, at, mask)
            for row, n in enumerate(parts):
                np.testing.assert_allclose(y[row, :n], wanted[row, start[row] : start[row] + n], atol=3e-6)
        start = start + parts


def test_only_windows_shorter_than_the_context_roll() -> None:
    graph = decoder(window=8)
    assert "rolling" not in str(run_passes(graph, "kv-cache, rolling-buffer{length=8}"))
    trace = Trace()
    cached = run_passes(graph, "kv-cache")
    RollingBuffer(length=8).run(cached, trace)
    assert "no cache has a window below 8 tokens" in trace.lines[0]
    graph.meta["context"] = 9
    assert "[batch, 2, 8, 8]" in str(run_passes(graph, ROLL))


def test_rolling_buffer_passes_its_own_check() -> None:
    cached = run_passes(decoder(window=5), "kv-cache")
    run_passes(decoder(window=5), "kv-cache, rolling-buffer{slack=2}", verify=True)
    rolled = run_passes(cached, "rolling-buffer")
    RollingBuffer().check(cached, rolled, EquivalenceCheck())
