"""Residual arrangements, repeated blocks, and mixture of depths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft.frontends.dsl import (
    MLP,
    Attention,
    Block,
    Decoder,
    Encoder,
    GatedMLP,
    LayerNorm,
    Mamba,
    MixtureOfDepths,
    Repeat,
    RMSNorm,
    RoPE,
    trace,
)
from weft.frontends.dsl.blocks import ARRANGEMENTS
from weft.ir import TensorType, WeftError, interpret, verify
from weft.ir.types import dtypes, sizes

from .formulas.elementary import Array, Weights, layer_norm, linear, rms_norm, sigmoid, softplus
from .formulas.feed_forward import ARRANGED, feed_forward
from .harness import RUNNERS, Row, check, close, outputs, trace_checked

# Two feed-forwards, because these tests are about the residual between sublayers.
ATTN, FFN = MLP(24, "silu"), GatedMLP(20, "gelu")


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("norm", [LayerNorm(1e-5), RMSNorm(1e-6)], ids=str)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arrangement(arrangement: str, norm: LayerNorm | RMSNorm, runner: str) -> None:
    def formula(x: Array, w: Weights) -> Array:
        def normalize(name: str, x: Array) -> Array:
            if isinstance(norm, LayerNorm):
                return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], norm.eps)
            return rms_norm(x, w[f"{name}.weight"], norm.eps)

        attn, ffn = feed_forward(ATTN, "attn."), feed_forward(FFN, "ffn.")
        return ARRANGED[arrangement](x, normalize, lambda x: attn(x, w), lambda x: ffn(x, w))

    check(Row(Block(ATTN, FFN, norm, arrangement), formula), runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_residual_scale(runner: str) -> None:
    def formula(x: Array, w: Weights) -> Array:
        return x + 0.5 * feed_forward(ATTN, "attn.")(rms_norm(x, w["attn_norm.weight"]), w)

    check(Row(Block(ATTN, residual_scale=0.5), formula), runner)


def test_repeated_blocks_share_their_weights(rng: np.random.Generator) -> None:
    shared = Encoder(10, 16, 1, Repeat(Block(Attention(4), MLP(8)), 3), embed_dim=4, embed_norm=RMSNorm()).graph()
    verify(shared, recipes=True)
    assert (shared.params["embed.weight"].shape, shared.params["embed_norm.weight"].shape) == ((10, 4), (4,))
    plain = Encoder(10, 16, 3, Block(Attention(4), MLP(8)), embed_dim=4, embed_norm=RMSNorm()).graph()
    params = {n: rng.standard_normal(v.shape) for n, v in shared.params.items()}

    def source(name: str) -> str:
        layer, _, rest = name.removeprefix("layers.").partition(".")
        return f"layers.0.block.{rest}" if layer.isdigit() else name

    feeds = {"input_ids": rng.integers(0, 10, (2, 5)), "attention_mask": np.ones((2, 5), np.int64)}
    one = interpret(shared, feeds, params=params)["last_hidden_state"]
    close(one, interpret(plain, feeds, params={n: params[source(n)] for n in plain.params})["last_hidden_state"])


# -- mixture of depths

BLOCK = Block(Attention(4, 2, rope=RoPE(100.0), window=3), MLP(24))
WITHOUT_POSITIONS = Block(Attention(4, 2), MLP(24))


def expected(block: Block, x: Array, chosen: list[Array], weights: Weights) -> Array:
    """Return x with the block's change, times σ(r), at the chosen tokens of each row; `block` sees only those."""
    graph, y = trace_checked(block), x.copy()
    own = {name.removeprefix("block."): array for name, array in weights.items() if name.startswith("block.")}
    for row, at in enumerate(chosen):
        inputs = {"x": x[row : row + 1, at], "position_ids": at[None]}
        (made,) = interpret(graph, {name: inputs[name] for name in graph.inputs}, params=own).values()
        y[row, at] += sigmoid(linear(x[row, at], weights, "router")) * (made[0] - x[row, at])
    return y


@pytest.mark.parametrize("block", [BLOCK, WITHOUT_POSITIONS], ids=["positions", "no positions"])
@pytest.mark.parametrize("capacity", [1, 5, 11])
def test_mixture_of_depths_runs_the_tokens_with_the_best_scores(
    block: Block, capacity: int, rng: np.random.Generator
) -> None:
    x, made, weights = outputs(MixtureOfDepths(block, capacity, aux_loss=0.5), rng, 11)
    r = linear(x, weights, "router")[..., 0]
    chosen = [np.sort(np.argsort(-row)[:capacity]) for row in r]
    close(made["output"], expected(block, x, chosen, weights), factor=4)
    hits = np.array([np.isin(np.arange(11), at) for at in chosen])
    close(made["aux_loss"], 0.5 * -np.where(hits, -softplus(-r), -softplus(r)).mean())


@pytest.mark.parametrize(
    "block",
    [
        WITHOUT_POSITIONS,
        Block(Attention(4, 2, rope=RoPE(100.0)), MLP(24)),
        Block(Attention(2, softcap=5.0), MLP(24)),
        Block(Attention(2, scale=0.01), MLP(24)),
    ],
)
def test_mixture_of_depths_runs_tokens_with_a_positive_score(block: Block, rng: np.random.Generator) -> None:
    x, made, weights = outputs(MixtureOfDepths(block), rng, 11)
    chosen = [np.flatnonzero(row > 0) for row in linear(x, weights, "router")[..., 0]]
    assert all(0 < len(at) < 11 for at in chosen)
    close(made["output"], expected(block, x, chosen, weights), factor=4)


def test_mixture_of_depths_has_the_inputs_that_its_block_reads() -> None:
    decoder: dict[str, Any] = {"vocab": 50, "dim": 16, "layers": 2}
    graph = Decoder(**decoder, block=MixtureOfDepths(WITHOUT_POSITIONS, 3)).graph()
    assert list(graph.inputs) == ["input_ids"]
    graph = Decoder(**decoder, block=MixtureOfDepths(BLOCK, 3)).graph()
    assert list(graph.inputs) == ["input_ids", "position_ids"]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("onnx", r"top_k \(%layers.0.best_scores\) mixes or counts tokens but"),
        (
            "torch",
            r"cannot generate: attention \(%layers.0.block.attn.attention\) runs on tokens chosen from",
        ),
        (
            "transformers",
            r"cannot generate: attention \(%layers.0.block.attn.attention\) runs on tokens chosen",
        ),
    ],
)
def test_mixture_of_depths_with_a_capacity_is_not_compiled(target: str, reason: str, tmp_path: Path) -> None:
    model = Decoder(vocab=50, dim=16, layers=1, block=MixtureOfDepths(WITHOUT_POSITIONS, 3), context=16)
    with pytest.raises(WeftError, match=reason):
        weft.compile(model, tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def test_passes_that_the_error_proposes_compile(tmp_path: Path) -> None:
    model = Decoder(vocab=50, dim=16, layers=1, block=MixtureOfDepths(WITHOUT_POSITIONS, 3), context=16)
    with pytest.raises(WeftError) as refused:
        weft.compile(model, tmp_path / "out", target="onnx")
    passes = str(refused.value).partition("--passes ")[2].rstrip(")")
    weft.compile(model, tmp_path / "out", target="onnx", passes=passes)
    assert (tmp_path / "out" / "model.onnx").is_file()


def test_mixture_of_depths_rejects_blocks_and_models_that_do_not_fit() -> None:
    with pytest.raises(WeftError, match="aux_loss needs capacity="):
        MixtureOfDepths(BLOCK, aux_loss=0.1)
    with pytest.raises(WeftError, match="a mixture of depths must be in a Decoder"):
        Encoder(vocab=50, dim=16, layers=1, block=MixtureOfDepths(WITHOUT_POSITIONS)).graph()
    with pytest.raises(WeftError, match="not in another mixture of depths"):
        Decoder(vocab=50, dim=16, layers=1, block=MixtureOfDepths(MixtureOfDepths(WITHOUT_POSITIONS))).graph()
    with pytest.raises(WeftError, match="causal_conv would also read tokens that are not selected: set capacity="):
        Decoder(vocab=50, dim=16, layers=1, block=MixtureOfDepths(Block(Mamba(32)))).graph()
    layers = [Block(Attention(4, keep_kv="a")), MixtureOfDepths(Block(Attention(4, share_kv="a")))]
    with pytest.raises(WeftError, match="keep_kv and share_kv need all tokens, but a mixture of depths"):
        Decoder(vocab=50, dim=16, layers=layers).graph()
    short = TensorType(dtypes.f32, (sizes.sym("batch"), 8, 16))
    with pytest.raises(WeftError, match="k=9 exceeds the last axis"):
        trace(MixtureOfDepths(WITHOUT_POSITIONS, 9), {"x": short})
