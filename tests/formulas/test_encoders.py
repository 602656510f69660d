"""Mixers of encoders written out: disentangled attention score by score, and the Fourier transform."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from weft.frontends.dsl import (
    DisentangledAttention,
    Encoder,
    FourierMixing,
    LayerNorm,
    RelativeTable,
    module,
    providing,
    trace,
)
from weft.frontends.dsl.blocks import Block
from weft.frontends.dsl.build import Layer
from weft.ir import TensorType, Value, WeftError, ops
from weft.ir.types import dtypes

from .harness import RUNNERS, Array, Row, Weights, check

HEADS = 2


@module
class InEncoder:
    """`inner` as an encoder calls it."""

    inner: Layer
    relative: RelativeTable | None = None

    def __call__(self, x: Value) -> Value:
        row = ops.unsqueeze(ops.iota(x, axis=1), axes=(0,))
        with providing(bidirectional=row, position_row=row), providing(**self.relative(x) if self.relative else {}):
            return self.inner(x)


@pytest.mark.parametrize("length", [1, 11, 12])
@pytest.mark.parametrize("runner", RUNNERS)
def test_fourier(runner: str, length: int) -> None:
    check(Row(InEncoder(FourierMixing()), lambda x, w: np.fft.fft2(x).real, length=length, exact=False), runner)


def test_fourier_of_many_tokens() -> None:
    """Products of positions exceed what f32 counts."""
    check(Row(InEncoder(FourierMixing()), lambda x, w: np.fft.fft2(x).real, 4, 1500, exact=False), "interpreter")


def distance_row(apart: int, table: RelativeTable) -> int:
    """The row of a key `apart` tokens before its query."""
    exact = table.span // 2
    if table.max_distance is not None and abs(apart) > exact:
        steps = math.log(abs(apart) / exact) / math.log((table.max_distance - 1) / exact) * (exact - 1)
        apart = int(math.copysign(exact + math.ceil(round(steps, 9)), apart))
    return min(max(apart + table.span, 0), 2 * table.span - 1)


def disentangled(x: Array, w: Weights, attention: DisentangledAttention, table: RelativeTable) -> Array:
    def mapped(rows: Array, name: str) -> Array:
        return rows @ w[f"inner.{name}.weight"].T + w.get(f"inner.{name}.bias", 0.0)

    vectors = w["relative.weight"]
    if table.norm is not None:
        centred = vectors - vectors.mean(1, keepdims=True)
        vectors = centred / np.sqrt((centred**2).mean(1, keepdims=True) + table.norm.eps)
        vectors = vectors * w["relative.norm.weight"] + w["relative.norm.bias"]
    names = ("k", "q") if attention.shared else ("pos_k", "pos_q")
    terms = 1 + attention.to_position + attention.from_position
    q, k, v = (mapped(x, name) for name in "qkv")
    heads, d = [], x.shape[1] // HEADS
    for h in range(HEADS):
        part = slice(h * d, (h + 1) * d)
        scores = np.zeros((len(x), len(x)))
        for i in range(len(x)):
            for j in range(len(x)):
                row = vectors[distance_row(i - j, table)]
                scores[i, j] = q[i, part] @ k[j, part]
                if attention.to_position:
                    scores[i, j] += q[i, part] @ mapped(row, names[0])[part]
                if attention.from_position:
                    scores[i, j] += k[j, part] @ mapped(row, names[1])[part]
        weights = np.exp(scores / math.sqrt(d * terms))
        heads.append(weights / weights.sum(1, keepdims=True) @ v[:, part])
    return mapped(np.concatenate(heads, 1), "o")


CASES = {
    "both": (DisentangledAttention(HEADS), RelativeTable(5)),
    "logarithmic": (DisentangledAttention(HEADS), RelativeTable(6, max_distance=9, norm=LayerNorm(1e-5))),
    "shared": (DisentangledAttention(HEADS, shared=True), RelativeTable(40)),
    "to": (DisentangledAttention(HEADS, from_position=False, key_bias=False), RelativeTable(3)),
    "from": (DisentangledAttention(HEADS, to_position=False), RelativeTable(3)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_disentangled(runner: str, case: str) -> None:
    attention, table = CASES[case]
    check(Row(InEncoder(attention, table), partial(disentangled, attention=attention, table=table), 12), runner)


def test_refusals() -> None:
    x = {"x": TensorType(dtypes.f32, (1, 3, 4))}
    for inner in (FourierMixing(), DisentangledAttention(2)):
        with pytest.raises(WeftError, match="it belongs in an Encoder"):
            trace(inner, x)
    with pytest.raises(WeftError, match="give the Encoder relative=RelativeTable"):
        trace(InEncoder(DisentangledAttention(2)), x)
    with pytest.raises(WeftError, match="a table of relative positions belongs in an Encoder"):
        trace(RelativeTable(4), x)
    with pytest.raises(WeftError, match="max_distance=3 must exceed half of span=4, at least 2, by 2"):
        RelativeTable(4, 3)
    with pytest.raises(WeftError, match="relative="):
        Encoder(9, 4, 1, Block(FourierMixing()), relative=3)
