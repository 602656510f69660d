"""Latent, relative, linear and disentangled attention, and Fourier mixing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends import dsl
from weft.frontends.dsl.build import Layer
from weft.ir import TensorType, Value, WeftError, interpret, ops
from weft.ir.types import dtypes

from .formulas.attention import disentangled_attention, latent_attention, linear_attention, relative_attention
from .formulas.elementary import Array
from .harness import RUNNERS, Row, check


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"q_rank": 7},
        {"rope": dsl.RoPE(100.0, interleaved=True), "scale": 0.3},
        {"norm": dsl.RMSNorm(1e-2)},
        {"absorbed": False},
        {"index": dsl.LightningIndex(5, 6, top_k=2)},
        {"q_rank": 7, "index": dsl.LightningIndex(5, 6, top_k=3, rope=dsl.RoPE(50.0, dim=4))},
    ],
    ids=str,
)
def test_latent_attention(options: dict[str, Any], runner: str) -> None:
    module = dsl.MLA(3, 8, 6, 4, 5, **{"rope": dsl.RoPE()} | options)
    check(Row(module, latent_attention(module)), runner)


def test_latent_attention_has_one_key_head() -> None:
    graph = dsl.Decoder(10, 16, 1, dsl.Block(dsl.MLA(4, 8, 6, 4, 5, dsl.RoPE()), dsl.MLP(8))).graph()
    (node,) = [n for n in graph.nodes if n.op is ops.attention]
    assert (node.attrs["kv_heads"], node.inputs[1].width) == (1, 8 + 4)


def test_latent_attention_rejects_encoders() -> None:
    with pytest.raises(WeftError, match=r"layers.0.attn \(MLA\): MLA is causal: it must be in a Decoder"):
        dsl.Encoder(10, 16, 1, dsl.Block(dsl.MLA(4, 8, 6, 4, 5, dsl.RoPE()))).graph()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("clip", "values"), [(1, True), (4, True), (4, False), (20, True)])
def test_relative_attention(clip: int, values: bool, causal: bool, runner: str) -> None:
    module = dsl.RelativeAttention(3, clip, values=values, causal=causal)
    check(Row(module, relative_attention(module), 24, 13), runner)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rope", [None, dsl.RoPE(), dsl.RoPE(50.0, interleaved=True)], ids=str)
def test_linear_attention(rope: dsl.RoPE | None, causal: bool, runner: str) -> None:
    module = dsl.LinearAttention(3, rope, causal=causal)
    check(Row(module, linear_attention(module), 24, 13), runner)


@pytest.mark.parametrize(
    "mixer",
    [dsl.Attention(4), dsl.RelativeAttention(4, 2), dsl.LinearAttention(4), dsl.Attention(4, bias=dsl.ALiBi())],
    ids=str,
)
def test_encoder_output_is_independent_of_padding(mixer: Any, rng: np.random.Generator) -> None:
    graph = dsl.Encoder(10, 16, 2, dsl.Block(mixer, dsl.MLP(8))).graph()
    params = {n: rng.standard_normal(v.shape) for n, v in graph.params.items() if n != "alibi.slopes"}

    def hidden(ids: Array) -> Array:
        mask = np.broadcast_to((np.arange(7) < 5).astype(np.int64), ids.shape)
        return interpret(graph, {"input_ids": ids, "attention_mask": mask}, params=params)["last_hidden_state"][:, :5]

    ids = rng.integers(0, 9, (2, 7))
    other = np.where(np.arange(7) < 5, ids, 9)
    np.testing.assert_array_equal(hidden(ids), hidden(other))


# -- mixers of encoders


@dsl.module
class InEncoder:
    """`inner` as an encoder calls it."""

    inner: Layer
    relative: dsl.RelativeTable | None = None

    def __call__(self, x: Value) -> Value:
        row = ops.unsqueeze(ops.iota(x, axis=1), axes=(0,))
        with (
            dsl.providing(bidirectional=row, position_row=row),
            dsl.providing(**self.relative(x) if self.relative else {}),
        ):
            return self.inner(x)


@pytest.mark.parametrize("length", [1, 11, 12])
@pytest.mark.parametrize("runner", RUNNERS)
def test_fourier_mixing(runner: str, length: int) -> None:
    check(Row(InEncoder(dsl.FourierMixing()), lambda x, w: np.fft.fft2(x).real, length=length, exact=False), runner)


def test_fourier_mixing_of_long_sequences() -> None:
    """Products of positions exceed the integers that float32 represents."""
    check(Row(InEncoder(dsl.FourierMixing()), lambda x, w: np.fft.fft2(x).real, 4, 1500, exact=False))


DISENTANGLED = {
    "both": (dsl.DisentangledAttention(2), dsl.RelativeTable(5)),
    "logarithmic": (dsl.DisentangledAttention(2), dsl.RelativeTable(6, max_distance=9, norm=dsl.LayerNorm(1e-5))),
    "shared": (dsl.DisentangledAttention(2, shared=True), dsl.RelativeTable(40)),
    "to position": (dsl.DisentangledAttention(2, from_position=False, key_bias=False), dsl.RelativeTable(3)),
    "from position": (dsl.DisentangledAttention(2, to_position=False), dsl.RelativeTable(3)),
}


@pytest.mark.parametrize("case", DISENTANGLED)
@pytest.mark.parametrize("runner", RUNNERS)
def test_disentangled_attention(runner: str, case: str) -> None:
    attention, table = DISENTANGLED[case]
    check(Row(InEncoder(attention, table), disentangled_attention(attention, table), 12), runner)


def test_mixers_of_encoders_reject_other_models() -> None:
    x = {"x": TensorType(dtypes.f32, (1, 3, 4))}
    for inner in (dsl.FourierMixing(), dsl.DisentangledAttention(2)):
        with pytest.raises(WeftError, match="it belongs in an Encoder"):
            dsl.trace(inner, x)
    with pytest.raises(WeftError, match="set relative=RelativeTable"):
        dsl.trace(InEncoder(dsl.DisentangledAttention(2)), x)
    with pytest.raises(WeftError, match="RelativeTable must be in an Encoder"):
        dsl.trace(dsl.RelativeTable(4), x)
