"""Biases of attention scores by distance: ALiBi, the buckets of T5, and custom ones."""

from __future__ import annotations

import numpy as np
import pytest

from weft.frontends.dsl import ALiBi, Attention, Block, Decoder, Encoder, RelativeTable, T5Bias, module
from weft.ir import Value, WeftError, interpret, ops, verify

from .formulas.attention import attention
from .formulas.positions import alibi_slope, t5_bucket
from .harness import RUNNERS, Row, check, close


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "scale"), [(4, 1.0), (6, 1.0), (4, 0.5)])
def test_alibi(heads: int, scale: float, causal: bool, runner: str) -> None:
    module = Attention(heads, bias=ALiBi(scale=scale), causal=causal)
    slopes = [scale * float(np.float32(alibi_slope(heads, h))) for h in range(heads)]
    check(Row(module, attention(module, lambda h, i, j, w: -slopes[h] * abs(i - j)), 24, 13), runner)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(8, 20), (32, 128), (6, 12)])
def test_t5_bias(buckets: int, max_distance: int, causal: bool, runner: str) -> None:
    def bias(h: int, i: int, j: int, w: dict[str, np.ndarray]) -> float:
        return float(w["bias.weight"][t5_bucket(j - i, buckets, max_distance, causal), h])

    module = Attention(2, bias=T5Bias(buckets, max_distance), causal=causal, scale=1.0)
    check(Row(module, attention(module, bias), 8, 40, std=0.3), runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_custom_bias(runner: str) -> None:
    @module
    class Nearest:
        """Keys farther than one away cost ten."""

        def __call__(self, x: Value, heads: int, causal: bool) -> Value:
            at = ops.iota(x, axis=1)
            distance = ops.abs(ops.sub(ops.unsqueeze(at, axes=(0,)), ops.unsqueeze(at, axes=(1,))))
            far = ops.cast(ops.less(ops.affine(distance, by=0, plus=1), distance), to=x.type.dtype)
            return ops.unsqueeze(ops.affine(far, by=-10.0), axes=(0, 1))

    biased = Attention(4, bias=Nearest())
    check(Row(biased, attention(biased, lambda h, i, j, w: -10.0 * (abs(i - j) > 1))), runner)


@pytest.mark.parametrize("kind", [Decoder, Encoder])
def test_t5_bias_is_shared_by_all_layers(kind: type, rng: np.random.Generator) -> None:
    shared = kind(10, 16, 2, Block(Attention(4)), position_bias=T5Bias(8, 20, heads=4)).graph()
    verify(shared, recipes=True)
    own = kind(10, 16, 2, Block(Attention(4, bias=T5Bias(8, 20)))).graph()
    assert [n for n in shared.params if "bias" in n] == ["position_bias.weight"]
    assert [n for n in own.params if "bias" in n] == ["layers.0.attn.bias.weight", "layers.1.attn.bias.weight"]
    assert sum(n.op is ops.relative_position_bias for n in shared.nodes) == 1
    params = {n: rng.standard_normal(v.shape) for n, v in own.params.items()}
    table = params["layers.1.attn.bias.weight"] = params["layers.0.attn.bias.weight"]
    feeds = {
        "input_ids": rng.integers(0, 10, (2, 9)),
        "position_ids": np.tile(np.arange(9), (2, 1)),
        "attention_mask": np.arange(9)[None] < [[9], [5]],
    }
    params["position_bias.weight"] = table
    one, other = (
        interpret(g, {n: feeds[n] for n in g.inputs}, params={n: params[n] for n in g.params}) for g in (shared, own)
    )
    for name, value in one.items():
        close(value, other[name])


def test_relative_table_rejects_a_short_max_distance() -> None:
    with pytest.raises(WeftError, match="max_distance=3 must be at least 4, span=4 at least 2"):
        RelativeTable(4, 3)
