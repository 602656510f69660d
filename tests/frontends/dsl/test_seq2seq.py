"""EncoderDecoder: Vaswani's model equals torch.nn.Transformer in float64; invalid models are rejected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from weft import (
    MLP,
    Attention,
    Block,
    CrossAttention,
    Decoder,
    Encoder,
    EncoderDecoder,
    LayerNorm,
    RMSNorm,
    Sinusoidal,
    WeftError,
)
from weft.frontends.dsl import T5Bias
from weft.ir import Graph, interpret, ops, parse, verify

from .formulas.positions import sinusoids

VOCAB, DIM, HEADS, LAYERS, HIDDEN = 41, 24, 3, 2, 36


def vaswani(arrangement: str = "post", **decoder: Any) -> EncoderDecoder:
    bias = {"qkv_bias": True, "out_bias": True}
    attn, norm, ffn = Attention(HEADS, **bias), LayerNorm(), MLP(HIDDEN, "relu", bias=True)
    shape, ends = (VOCAB, DIM, LAYERS), {"positions": Sinusoidal(64), "embed_scale": math.sqrt(DIM), "final_norm": norm}
    return EncoderDecoder(
        Encoder(*shape, Block(attn, ffn, norm, arrangement), **ends),
        Decoder(
            *shape,
            Block(attn, ffn, norm, arrangement, cross=CrossAttention(HEADS, **bias)),
            tie_embeddings=True,
            **{**ends, **decoder},
        ),
    )


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    mask = (np.arange(7) < [[7], [4], [1]]).astype(np.int64)
    source, ids = rng.integers(0, VOCAB, mask.shape), rng.integers(0, VOCAB, (3, 9))
    at = np.broadcast_to(np.arange(9), ids.shape)
    return {"encoder_input_ids": source, "encoder_attention_mask": mask, "input_ids": ids, "position_ids": at}


def drawn(graph: Graph) -> dict[str, np.ndarray]:
    """Random values for every parameter; the table of positions by its formula, in float64."""
    rng = np.random.default_rng(1)
    return {
        name: sinusoids(np.arange(param.shape[0]), DIM)
        if name.endswith(".table")
        else rng.normal(1.0 if name.endswith("norm.weight") else 0.0, 0.3, param.shape)
        for name, param in graph.params.items()
    }


def torch_transformer(values: dict[str, np.ndarray], norm_first: bool) -> torch.nn.Transformer:
    """torch's own model with the same numbers, in float64."""
    options: dict[str, Any] = {"batch_first": True, "dropout": 0.0, "dtype": torch.float64}
    layer = torch.nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, norm_first=norm_first, **options)
    norm = torch.nn.LayerNorm(DIM, dtype=torch.float64)
    encoder = torch.nn.TransformerEncoder(layer, LAYERS, norm, enable_nested_tensor=False)
    net = torch.nn.Transformer(
        *(DIM, HEADS, LAYERS, LAYERS, HIDDEN), norm_first=norm_first, custom_encoder=encoder, **options
    )
    state: dict[str, np.ndarray] = {}
    for half, norms in (("encoder", ["attn", "ffn"]), ("decoder", ["attn", "cross", "ffn"])):
        for part in ("weight", "bias"):
            state[f"{half}.norm.{part}"] = values[f"{half}.final_norm.{part}"]
            for i in range(LAYERS):
                ours = theirs = f"{half}.layers.{i}"
                for number, name in enumerate(norms, 1):
                    state[f"{theirs}.norm{number}.{part}"] = values[f"{ours}.{name}_norm.{part}"]
                for name, module in (("attn", "self_attn"), ("cross", "multihead_attn"))[: len(norms) - 1]:
                    packed = np.concatenate([values[f"{ours}.{name}.{w}.{part}"] for w in "qkv"])
                    state[f"{theirs}.{module}.in_proj_{part}"] = packed
                    state[f"{theirs}.{module}.out_proj.{part}"] = values[f"{ours}.{name}.o.{part}"]
                state[f"{theirs}.linear1.{part}"] = values[f"{ours}.ffn.up.{part}"]
                state[f"{theirs}.linear2.{part}"] = values[f"{ours}.ffn.down.{part}"]
    net.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    return net.eval()


@pytest.mark.parametrize("arrangement", ["post", "pre"])
def test_encoder_decoder_equals_torch(arrangement: str) -> None:
    graph = vaswani(arrangement).graph()
    verify(graph, recipes=True)
    assert parse(str(graph)) == graph
    values, given = drawn(graph), inputs()
    got = interpret(graph, given, params=values)["logits"]
    net, table = torch_transformer(values, arrangement == "pre"), values["embed.weight"]
    source, target = (
        torch.from_numpy(table[given[name]] * math.sqrt(DIM) + sinusoids(np.arange(given[name].shape[1]), DIM))
        for name in ("encoder_input_ids", "input_ids")
    )
    hidden = torch.from_numpy(given["encoder_attention_mask"] == 0)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    hiding = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    with torch.no_grad():
        want = net(source, target, tgt_mask=causal, **hiding).numpy() @ table.T
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-11 * np.abs(want).max())


def test_embeddings_are_shared_by_default() -> None:
    shared = vaswani().graph()
    assert [name for name in shared.params if "embed" in name] == ["embed.weight"]
    apart = EncoderDecoder(vaswani().encoder, vaswani().decoder, share_embeddings=False).graph()
    assert [name for name in apart.params if "embed" in name] == ["encoder.embed.weight", "decoder.embed.weight"]
    assert apart.meta["max_source_positions"] == apart.meta["source_context"] == apart.meta["context"] == 64


def test_encoder_and_decoder_have_their_own_t5_bias() -> None:
    bias, attn, norm = T5Bias(8, 16, heads=HEADS), Attention(HEADS, scale=1.0), RMSNorm()
    shape = (VOCAB, DIM, LAYERS)
    graph = EncoderDecoder(
        Encoder(*shape, Block(attn, MLP(HIDDEN), norm), position_bias=bias, final_norm=norm),
        Decoder(*shape, Block(attn, MLP(HIDDEN), norm, cross=CrossAttention(HEADS)), position_bias=bias),
    ).graph()
    makers = [n for n in graph.nodes if n.op is ops.relative_position_bias]
    assert [n.attrs["bidirectional"] for n in makers] == [True, False]
    assert [name for name in graph.params if "bias" in name] == [
        *("encoder.position_bias.weight", "decoder.position_bias.weight")
    ]
    crossing = [n for n in graph.nodes if n.op is ops.attention and n.scope.endswith("cross")]
    assert len(crossing) == LAYERS and all(n.operand("bias") is None for n in crossing)


def plain(**options: Any) -> dict[str, Any]:
    return {"vocab": VOCAB, "dim": DIM, "layers": 1, "block": Block(Attention(HEADS), MLP(HIDDEN))} | options


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: EncoderDecoder(Encoder(**plain()), Decoder(**plain(dim=12))),
            "in the decoder: make them equal, or set share_embeddings=False",
        ),
        (lambda: EncoderDecoder(Encoder(**plain(token_types=2)), Decoder(**plain())), "token_types=2"),
        (lambda: EncoderDecoder(Encoder(**plain()), Decoder(**plain())), "no block of the decoder attends"),
        (
            lambda: Decoder(**plain(block=Block(Attention(HEADS), MLP(8), cross=CrossAttention(HEADS)))),
            r"layers\.0\.cross \(CrossAttention\): CrossAttention has no encoder to read",
        ),
    ],
)
def test_encoder_decoder_rejects_parts_that_do_not_fit(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(WeftError, match=words):
        make().graph()
