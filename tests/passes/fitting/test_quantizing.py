"""Rounding of weights: nearest codes, stored blocks, and second moments of their inputs."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from weft.ir import Graph, MemoryReader, TensorType
from weft.ir.recipes import Source
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import build_integer_layout
from weft.passes import run_passes
from weft.passes.fitting import quantizing
from weft.passes.fitting.quantizing import (
    compute_moment,
    count_stored_bits,
    find_stored_layout,
    round_to_nearest,
    store_rounded,
)

from ..library.quantize.checkpoints import USED, model

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((3, 64)).astype(np.float32)
LAYOUT = build_integer_layout(8, 32, False)


def graph(array: np.ndarray = WEIGHT) -> Graph:
    g = Graph("g", MemoryReader({"w": array}))
    g.add_output("w", g.add_param("w", TensorType(dtypes.f32, array.shape), Source("w")))
    g.outputs.clear()
    return g


@pytest.mark.parametrize("rows", [quantizing.ROWS, 3], ids=["at once", "in parts"])
@pytest.mark.parametrize("columns", [quantizing.COLUMNS, 2], ids=["one strip", "strips"])
def test_moment_is_the_sum_of_outer_products(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizing, "ROWS", rows)
    monkeypatch.setattr(quantizing, "COLUMNS", columns)
    parts, others = ([RNG.standard_normal((2, 3, 5)) for _ in range(3)] for _ in range(2))
    x, y = (np.concatenate([p.reshape(-1, 5) for p in side]) for side in (parts, others))
    np.testing.assert_allclose(compute_moment(parts), x.T @ x, rtol=1e-5)
    np.testing.assert_allclose(compute_moment(parts, others), x.T @ y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stored", [False, True])
def test_nearest_codes_are_half_a_step_away_at_most(stored: bool) -> None:
    g = graph()
    if stored:
        store_rounded(g.params["w"], LAYOUT, "")
    else:
        round_to_nearest(g.params["w"], LAYOUT)
    found = g.params["w"].recipe.evaluate(g.reader)
    steps = np.abs(WEIGHT.reshape(3, 2, 32)).max(-1, keepdims=True) / 127
    errors = np.abs(found - WEIGHT).reshape(3, 2, 32)
    assert (errors <= 0.51 * steps).all() and errors.max() > 0


def test_floats_on_a_grid_count_as_stored_codes() -> None:
    g = graph()
    assert find_stored_layout(g.params["w"]) is None and count_stored_bits(None) == 16
    codes = RNG.integers(-127, 128, (3, 64))
    codes[:, ::32] = 127
    layout = find_stored_layout(graph((codes * 0.25).astype(np.float32)).params["w"])
    assert layout == LAYOUT and count_stored_bits(layout) == pytest.approx(8.5, abs=0.51)


def test_time_of_a_long_fit_is_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Measured on the first matrices: here every look at the clock takes 100 seconds."""
    ticks = itertools.count(step=100.0)
    monkeypatch.setattr(quantizing.time, "perf_counter", lambda: next(ticks))
    graph = model()
    graph.tokenize = lambda texts: [[i % USED for i in range(512)] for _ in texts]
    run_passes(graph, "quantize{tokens=512}")
    (message,) = caplog.messages
    assert re.match(
        r"quantize: gptq fits \d+ matrices to 512 tokens of text, about \d+ minutes more, measured", message
    )


def test_short_fit_reports_no_time(caplog: pytest.LogCaptureFixture) -> None:
    graph = model()
    graph.tokenize = lambda texts: [[i % USED for i in range(512)] for _ in texts]
    run_passes(graph, "quantize{tokens=512}")
    assert not caplog.messages
