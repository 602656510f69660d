"""Mixture of depths against the block alone, run on the chosen tokens of one text after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft.frontends.dsl import MLP, Attention, Block, Decoder, Encoder, Mamba, MixtureOfDepths, RoPE, trace
from weft.ir import TensorType, WeftError, interpret
from weft.ir.types import dtypes, sizes

from ..formulas import Array, X, close, outputs, sigmoid, softplus

BLOCK = Block(Attention(4, 2, rope=RoPE(100.0), window=3), MLP(24))
UNPLACED = Block(Attention(4, 2), MLP(24))  # asks for no positions


def alone(block: Block, x: Array, at: Array, params: dict[str, Array]) -> Array:
    """`block` of the rows x [rows, dim] at positions `at` [rows]."""
    graph = trace(block, {"x": X})
    own = {name.removeprefix("block."): array for name, array in params.items() if name.startswith("block.")}
    inputs = {"x": x[None], "position_ids": at[None]}
    made = interpret(graph, {name: inputs[name] for name in graph.inputs}, params=own)
    return np.asarray(made["output"][0])


def expected(block: Block, x: Array, chosen: list[Array], params: dict[str, Array]) -> Array:
    y = x.copy()
    for row, at in enumerate(chosen):
        weight = sigmoid(x[row, at] @ params["router.weight"].T)
        y[row, at] += weight * (alone(block, x[row, at], at, params) - x[row, at])
    return y


@pytest.mark.parametrize("block", [BLOCK, UNPLACED])
@pytest.mark.parametrize("capacity", [1, 5, 11])
def test_the_best_tokens_pass_the_block(block: Block, capacity: int, rng: np.random.Generator) -> None:
    x, made, params = outputs(MixtureOfDepths(block, capacity, aux_loss=0.5), rng, 11)
    r = (x @ params["router.weight"].T)[..., 0]
    chosen = [np.sort(np.argsort(-row)[:capacity]) for row in r]
    close(made["output"], expected(block, x, chosen, params), 4)
    hits = np.array([np.isin(np.arange(11), at) for at in chosen])
    close(made["aux_loss"], 0.5 * -np.where(hits, -softplus(-r), -softplus(r)).mean())


@pytest.mark.parametrize(
    "block",
    [
        UNPLACED,
        Block(Attention(4, 2, rope=RoPE(100.0)), MLP(24)),
        Block(Attention(2, softcap=5.0), MLP(24)),
        Block(Attention(2, scale=0.01), MLP(24)),
    ],
)
def test_tokens_of_positive_score_pass_the_block(block: Block, rng: np.random.Generator) -> None:
    x, made, params = outputs(MixtureOfDepths(block), rng, 11)
    chosen = [np.flatnonzero(row > 0) for row in (x @ params["router.weight"].T)[..., 0]]
    assert all(0 < len(at) < 11 for at in chosen)
    close(made["output"], expected(block, x, chosen, params), 4)


def test_a_model_has_the_inputs_that_it_reads() -> None:
    decoder: dict[str, Any] = {"vocab": 50, "dim": 16, "layers": 2}
    assert list(Decoder(**decoder, block=MixtureOfDepths(UNPLACED, 3)).graph().inputs) == ["input_ids"]
    placed = Decoder(**decoder, block=MixtureOfDepths(BLOCK, 3)).graph()
    assert list(placed.inputs) == ["input_ids", "position_ids"]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("onnx", r"top_k \(%layers.0.best_scores\) mixes tokens or counts them"),
        (
            "torch",
            r"cannot write: attention \(%layers.0.block.attn.attention\) runs on tokens that are chosen among all",
        ),
        ("transformers", r"cannot write: attention \(%layers.0.block.attn.attention\) runs on tokens that are chosen"),
    ],
)
def test_a_model_that_chooses_among_all_tokens_is_not_compiled(target: str, reason: str, tmp_path: Path) -> None:
    model = Decoder(vocab=50, dim=16, layers=1, block=MixtureOfDepths(UNPLACED, 3), context=16)
    with pytest.raises(WeftError, match=reason):
        weft.compile(model, tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def test_what_the_refusal_proposes_works(tmp_path: Path) -> None:
    model = Decoder(vocab=50, dim=16, layers=1, block=MixtureOfDepths(UNPLACED, 3), context=16)
    with pytest.raises(WeftError) as refused:
        weft.compile(model, tmp_path / "out", target="onnx")
    passes = str(refused.value).partition("--passes ")[2].rstrip(")")
    weft.compile(model, tmp_path / "out", target="onnx", passes=passes)
    assert (tmp_path / "out" / "model.onnx").is_file()


def test_refusals() -> None:
    with pytest.raises(WeftError, match="aux_loss needs a capacity"):
        MixtureOfDepths(BLOCK, aux_loss=0.1)
    with pytest.raises(WeftError, match="mixture of depths is for decoders"):
        Encoder(vocab=50, dim=16, layers=1, block=MixtureOfDepths(UNPLACED)).graph()
    with pytest.raises(WeftError, match="cannot be nested"):
        Decoder(vocab=50, dim=16, layers=1, block=MixtureOfDepths(MixtureOfDepths(UNPLACED))).graph()
    with pytest.raises(WeftError, match="causal_conv sees all tokens before it, chosen or not: give a capacity"):
        Decoder(vocab=50, dim=16, layers=1, block=MixtureOfDepths(Block(Mamba(32)))).graph()
    layers = [Block(Attention(4, keep_kv="a")), MixtureOfDepths(Block(Attention(4, share_kv="a")))]
    with pytest.raises(WeftError, match="keep_kv and share_kv do not work inside mixture of depths"):
        Decoder(vocab=50, dim=16, layers=layers).graph()
    short = TensorType(dtypes.f32, (sizes.sym("batch"), 8, 16))
    with pytest.raises(WeftError, match="k=9 exceeds the last axis"):
        trace(MixtureOfDepths(UNPLACED, 9), {"x": short})
