"""Every variant the language can say, compiled for both targets: whole, in chunks, token by token, as interpreted.

`make test` runs each on one target, by turns.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import weft
from weft import (
    MLA,
    MLP,
    SLSTM,
    ALiBi,
    Attention,
    Block,
    Decoder,
    Encoder,
    GatedMLP,
    LayerNorm,
    LearnedPositions,
    LinearAttention,
    Mamba,
    Mamba2,
    MixtureOfDepths,
    MoE,
    RelativeAttention,
    Repeat,
    RMSNorm,
    RoPE,
    Router,
    RWKV6TimeMix,
    RWKV7TimeMix,
    Sinusoidal,
    T5Bias,
)
from weft.frontends.dsl.blocks import ARRANGEMENTS
from weft.ir import Graph, interpret
from weft.ir.recipes import Normal
from weft.ir.schema.visible_keys import PATTERNS
from weft.passes import Trace
from weft.passes.library.target.rope_length import RopeLength

from ..sampling import by_turns

LENGTH, DIM, VOCAB = 24, 32, 50
ROPE = RoPE()


def attends(*args: Any, **settings: Any) -> Decoder:
    return Decoder(VOCAB, DIM, 2, Block(Attention(4, *args, **settings), GatedMLP(24)), context=64)


def mixes(mixer: Any) -> Decoder:
    return Decoder(VOCAB, DIM, 2, Block(mixer, GatedMLP(24)), context=64)


def feeds(ffn: Any, **settings: Any) -> Decoder:
    return Decoder(VOCAB, DIM, 2, Block(Attention(4, 2, rope=ROPE), ffn, **settings), context=64)


def scaled(scaling: str, **settings: Any) -> Decoder:
    return attends(2, rope=RoPE(scaling=scaling, factor=2, original=16, **settings))


DECODERS = {
    **{name: feeds(MLP(24, name, bias=True)) for name in ("relu", "gelu", "gelu_tanh", "gelu_quick", "elu", "relu2")},
    **{f"mlp {name}": feeds(MLP(24, name)) for name in ("silu", "swish(1.5)", "tanh", "identity")},
    **{f"gated {name}": feeds(GatedMLP(24, name)) for name in ("sigmoid", "identity", "relu", "gelu", "silu")},
    "multi-head, no positions": attends(),
    "multi-query": attends(1, rope=ROPE),
    "window": attends(2, rope=ROPE, window=5),
    "window, first keys": attends(2, rope=ROPE, window=5, keep_first=2),
    **{name: attends(2, rope=ROPE, pattern=name, stride=4) for name in PATTERNS[1:]},
    "dilated window": attends(2, rope=ROPE, window=8, pattern="dilated", stride=2),
    "fixed, two summaries": attends(2, rope=ROPE, pattern="fixed", stride=4, summary=2),
    "sinks": attends(2, rope=ROPE, window=6, sinks=True),
    "soft cap": attends(2, rope=ROPE, softcap=2.0),
    "norm of q and k": attends(2, rope=ROPE, qk_norm=RMSNorm()),
    "norm of q and k, full": attends(2, rope=ROPE, qk_norm=RMSNorm(), qk_norm_full=True),
    "gate, biases": attends(2, rope=ROPE, gate=True, qkv_bias=True, out_bias=True),
    "latent": mixes(MLA(4, 16, 8, 4, 6, RoPE(interleaved=True))),
    "latent queries": mixes(MLA(4, 16, 8, 4, 6, ROPE, q_rank=12)),
    "linear": mixes(LinearAttention(4)),
    "linear, rope": mixes(LinearAttention(4, ROPE)),
    "relative": mixes(RelativeAttention(4, 3)),
    "layer norm": feeds(GatedMLP(24), norm=LayerNorm()),
    **{name: feeds(GatedMLP(24), arrangement=name) for name in ARRANGEMENTS[1:]},
    "sinusoidal": replace(attends(), positions=Sinusoidal(64)),
    "learned": replace(attends(), positions=LearnedPositions(64)),
    "T5 bias, shared": replace(attends(), position_bias=T5Bias(heads=4)),
    "T5 bias, per layer": attends(bias=T5Bias()),
    "ALiBi": attends(bias=ALiBi()),
    "ALiBi, window": attends(bias=ALiBi(), window=5),
    "partial, interleaved": attends(2, rope=RoPE(fraction=0.5, interleaved=True)),
    "partial, heads of 24": attends(2, head_dim=24, rope=RoPE(dim=16)),
    "linear scaling": scaled("linear"),
    "ntk": scaled("ntk"),
    "dynamic": scaled("dynamic"),
    "yarn": scaled("yarn", amplitude=1.1),
    "llama3": scaled("llama3"),
    "longrope": scaled("longrope", factors=(1.0,) * 4, long_factors=(1.0, 2.0, 3.0, 4.0)),
    "top-k": feeds(MoE(4, 16, 2)),
    "Switch": feeds(MoE(4, 16, 1, "relu", gated=False, router=Router(renormalize=False))),
    "noisy top-k, without noise": feeds(MoE(4, 16, 2, router=Router(noisy=True))),
    "load-balance loss": feeds(MoE(4, 16, 2, router=Router(aux_loss=0.01))),
    "hierarchical": feeds(MoE(8, 16, 2, router=Router(choice="hierarchical", groups=4, top_groups=2))),
    "groups, correction, shared": feeds(
        MoE(
            8,
            16,
            3,
            shared=GatedMLP(16),
            router=Router(scoring="sigmoid", correction=True, groups=4, top_groups=2, scale=2.5),
        )
    ),
    "experts with biases": feeds(
        MoE(4, 16, 2, "swish(1.702)", bias=True, limit=7.0, shift=1.0, router=Router(bias=True))
    ),
    "gated shared expert": feeds(MoE(4, 16, 2, shared=GatedMLP(16), shared_gate=True)),
    "Mamba": mixes(Mamba(48)),
    "Mamba with norms": mixes(Mamba(48, norms=RMSNorm())),
    "Mamba-2": mixes(Mamba2(48, 6, state=8)),
    "Mamba-2 in groups": mixes(Mamba2(48, 6, state=8, groups=2, norm_groups=2)),
    "repeated": Decoder(VOCAB, DIM, 1, Repeat(Block(Attention(4, rope=ROPE), MLP(24)), 3), context=64),
}
NEWER = {
    "RWKV-5": [Block(RWKV6TimeMix(4, static=True), MLP(24))] * 2,
    "RWKV-6": [Block(RWKV6TimeMix(4, 4, 5), MLP(24))] * 2,
    "RWKV-7": [Block(RWKV7TimeMix(4, **{by: "v"}), MLP(24)) for by in ("keep_values", "mix_values")],
    "sLSTM": [Block(SLSTM(4, conv=3), MLP(24))] * 2,
    "mixture of depths": [Block(Attention(4), MLP(24)), MixtureOfDepths(Block(Attention(4, rope=ROPE), MLP(24)))],
    "dropout": [Block(Attention(4), MLP(24), dropout=0.5)] * 2,
}
DECODERS |= {name: Decoder(VOCAB, DIM, layers, context=LENGTH) for name, layers in NEWER.items()}
IN_ONE_CALL = {  # they compare the tokens of a call
    "capacity, a share": feeds(MoE(4, 16, 1, router=Router(renormalize=False, capacity=1.25))),
    "capacity, a number": feeds(MoE(4, 16, 1, router=Router(renormalize=False, capacity=2))),
    "expert choice": feeds(MoE(4, 16, 2, router=Router(choice="expert"))),
    "capacity, of the batch": feeds(MoE(4, 16, 1, router=Router(renormalize=False, capacity=1.25, batched=True))),
    "expert choice, of the batch": feeds(MoE(4, 16, 2, router=Router(choice="expert", batched=True))),
}
ENCODERS = {
    "ALiBi": Block(Attention(4, bias=ALiBi()), MLP(24)),
    "T5 bias": Block(Attention(4, bias=T5Bias()), MLP(24)),
    "RoPE, window": Block(Attention(4, rope=ROPE, window=3), MLP(24)),
    "relative": Block(RelativeAttention(4, 3), MLP(24)),
    "linear": Block(LinearAttention(4, ROPE), MLP(24)),
    "experts": Block(Attention(4), MoE(4, 16, 2)),
}

TARGETS = ("ort-cpu", "onnx")


def drawn(graph: Graph) -> Graph:
    """`graph` with weights large enough to matter, for texts of LENGTH."""
    for p in graph.params.values():
        if isinstance(p.recipe, Normal):
            p.recipe = replace(p.recipe, std=0.3)
    RopeLength(LENGTH).run(graph, Trace())
    return graph


@pytest.mark.halved
@pytest.mark.parametrize(("name", "target"), by_turns([*DECODERS, *IN_ONE_CALL], TARGETS))
def test_decoder_variants_agree_with_the_interpreter(
    name: str, target: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    graph = drawn((DECODERS | IN_ONE_CALL)[name].graph())
    weft.compile(graph, tmp_path / "out", target=target, passes="default, -last-token-logits", max_length=LENGTH)
    runnable, ids = weft.load(tmp_path / "out"), rng.integers(0, VOCAB, LENGTH)
    known = {"input_ids": ids[None], "position_ids": np.arange(LENGTH)[None]}
    known |= {
        n: np.zeros(v.type.concrete({"batch": 1, "seq": LENGTH})) for n, v in graph.inputs.items() if "noise" in n
    }
    right = interpret(graph, {n: known[n] for n in graph.inputs})["logits"][0]
    for chunk in (LENGTH,) if name in IN_ONE_CALL else (LENGTH, 7, 1):
        np.testing.assert_allclose(runnable.logits(ids, chunk), right, rtol=0, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize("target", TARGETS)
def test_noisy_router_takes_its_noise_and_returns_a_loss(target: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """A graph as for training: seeded noise goes in, the load-balance loss comes out."""
    graph = drawn(feeds(MoE(4, 16, 2, router=Router(noisy=True, aux_loss=0.01))).graph())
    weft.compile(graph, tmp_path / "out", target=target, passes="dce, cse", max_length=LENGTH)
    session = ort.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    ids, at = rng.integers(0, VOCAB, (2, LENGTH)), np.broadcast_to(np.arange(LENGTH), (2, LENGTH))
    noise = {f"router_noise.{i}": rng.standard_normal((2, LENGTH, 4)) for i in range(2)}
    right = interpret(graph, {"input_ids": ids, "position_ids": at, **noise})
    inputs = {"input_ids": ids, "position_ids": at, **{n: v.astype(np.float32) for n, v in noise.items()}}
    found = dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs), strict=True))
    assert list(found) == ["logits", "aux_loss"]
    for name, value in right.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5 * np.abs(value).max())


@pytest.mark.parametrize(("name", "target"), by_turns(ENCODERS, TARGETS))
def test_encoder_variants_agree_with_the_interpreter(
    name: str, target: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Of a padded batch: each row as if it were alone."""
    graph = drawn(Encoder(VOCAB, DIM, 2, ENCODERS[name], context=64).graph())
    weft.compile(graph, tmp_path / "out", target=target, max_length=LENGTH)
    rows = [rng.integers(0, VOCAB, n) for n in (LENGTH, 9)]
    for ids, found in zip(rows, weft.load(tmp_path / "out").hidden_states(rows), strict=True):
        right = interpret(graph, {"input_ids": ids[None], "attention_mask": np.ones((1, len(ids)), np.int64)})
        (hidden,) = right["last_hidden_state"]
        np.testing.assert_allclose(found[: len(ids)], hidden, rtol=0, atol=1e-5 * np.abs(hidden).max())
