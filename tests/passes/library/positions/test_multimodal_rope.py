"""Rotations along three axes, pair by pair as complex numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import weft
from weft import Attention, Block, Decoder, GatedMLP, RoPE
from weft.ir import WeftError, interpret, parse
from weft.passes import run_passes

from ...rewrites import Rewrite, rewrites

GRAPH = """graph rotated {{
  input %x: f32[batch, seq, 24]
  input %position_ids: i64[batch, seq]
  param %f: f32[6] = rope_frequencies(12, theta=100.0)
  %y: f32[batch, seq, 24] = rope(%x, %position_ids, %f, heads=2, interleaved={interleaved}, amplitude=1.5)
  output y = %y
}}"""
MODEL = Decoder(vocab=30, dim=16, layers=2, block=Block(Attention(2, rope=RoPE(100.0)), GatedMLP(24)), context=16)


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("pairs", ["true", "false"])
@pytest.mark.parametrize(
    ("settings", "axes"),
    [
        ("sections=[1, 2, 3]", [0, 1, 1, 2, 2, 2]),
        ("sections=[2, 2, 2], interleaved=true", [0, 1, 2, 0, 1, 2]),
        ("sections=[4, 1, 1], interleaved=true", [0, 1, 2, 0, 0, 0]),
        ("sections=[6, 0, 0]", [0] * 6),
    ],
)
def test_every_pair_rotates_along_its_axis(
    settings: str, axes: list[int], pairs: str, rng: np.random.Generator
) -> None:
    before = parse(GRAPH.format(interleaved=pairs))
    after = run_passes(before, f"multimodal-rope{{{settings}}}", verify=True)
    x, at = rng.standard_normal((2, 5, 24)), rng.integers(0, 40, (2, 5, 3))
    frequencies = before.params["f"].recipe.evaluate(before.reader)
    angles = at[..., axes] * frequencies  # [batch, seq, pairs]
    heads = x.reshape(2, 5, 2, 12)
    apart = (heads[..., 0::2], heads[..., 1::2]) if pairs == "true" else (heads[..., :6], heads[..., 6:])
    turned = 1.5 * (apart[0] + 1j * apart[1]) * np.exp(1j * angles[:, :, None])
    want = np.stack([turned.real, turned.imag], -1) if pairs == "true" else np.stack([turned.real, turned.imag], -2)
    got = interpret(after, {"x": x, "rope_positions": at})["y"]
    np.testing.assert_allclose(got, want.reshape(2, 5, 24), rtol=0, atol=1e-12)


def test_caches_stay_in_the_order_of_tokens(tmp_path: Path) -> None:
    after = run_passes(MODEL.graph(), "multimodal-rope{sections=[2, 1, 1]}, kv-cache", verify=True)
    assert {"rope_positions", "position_ids"} <= set(after.inputs)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("", r"sections= is missing: give the pairs for time, height and width, as in \[16, 24, 24\]"),
        ("{sections=[2, 2]}", r"sections=\[2, 2\] must be three numbers that add up to 4"),
        ("{sections=[2, 2, 2]}", r"sections=\[2, 2, 2\] must be three numbers that add up to 4"),
        ("{sections=[5, -1, 0]}", r"sections=\[5, -1, 0\] must be three numbers that add up to 4"),
        ("{sections=[2, 1, 1]}, multimodal-rope", "graph decoder already has the input rope_positions"),
    ],
)
def test_refusals(settings: str, reason: str) -> None:
    with pytest.raises(WeftError, match=f"multimodal-rope: {reason}"):
        run_passes(MODEL.graph(), f"multimodal-rope{settings}")


def test_graph_without_rotations_is_refused() -> None:
    still = Decoder(vocab=30, dim=16, layers=1, block=Block(Attention(2), GatedMLP(24)))
    with pytest.raises(WeftError, match="nothing in graph decoder is rotated by the input position_ids"):
        run_passes(still.graph(), "multimodal-rope{sections=[2, 1, 1]}")


def test_weft_run_reports_missing_positions(tmp_path: Path) -> None:
    weft.compile(MODEL, tmp_path / "out", passes="default, multimodal-rope{sections=[2, 1, 1]}")
    with pytest.raises(WeftError, match="rope_positions"):
        weft.load(tmp_path / "out").generate([1, 2, 3], max_tokens=2)
