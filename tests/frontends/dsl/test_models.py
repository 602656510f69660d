"""Complete models: architecture files, the settings of decoders, the inputs of encoders."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import weft
from weft.frontends import dsl
from weft.ir import interpret, ops, verify

from .formulas.elementary import rms_norm
from .harness import close


def test_architecture_file_with_local_and_global_layers(tmp_path: Path) -> None:
    (tmp_path / "local_global.py").write_text("""\
# local_global.py
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE

local = Block(Attention(heads=8, kv_heads=2, rope=RoPE(10_000), window=512), GatedMLP(2048), norm=RMSNorm(1e-6))
wide = Block(Attention(heads=8, kv_heads=2, rope=RoPE(1_000_000)), GatedMLP(2048), norm=RMSNorm(1e-6))

model = Decoder(vocab=32_000, dim=512, layers=([local] * 5 + [wide]) * 4, tie_embeddings=True)
""")
    graph = weft.load_source(tmp_path / "local_global.py").graph
    verify(graph, recipes=True)
    windows = [n.attrs["window"] for n in graph.nodes if n.op is ops.attention]
    assert windows == ([512] * 5 + [None]) * 4
    assert "lm_head.weight" not in graph.params
    assert {n for n in graph.params if "rope" in n} == {"rope.frequencies", "rope.frequencies_2"}


def test_architecture_file_with_a_custom_module(tmp_path: Path) -> None:
    (tmp_path / "squared.py").write_text("""\
from weft import module, linear, square, relu

@module
class SquaredReLU:
    hidden: int

    def __call__(self, x):
        return linear(square(relu(linear(x, self.hidden, "up"))), x.width, "down")

from weft import Attention, Block, Decoder
model = Decoder(100, 32, 2, Block(Attention(4), SquaredReLU(64)))
""")
    graph = weft.load_source(tmp_path / "squared.py:model").graph
    verify(graph, recipes=True)
    assert graph.params["layers.1.ffn.up.weight"].shape == (64, 32)
    assert [n.op.name for n in graph.nodes if n.scope == "layers.0.ffn"] == ["linear", "relu", "square", "linear"]


def test_decoder_prints_as_it_is_written() -> None:
    attn = dsl.Attention(heads=32, kv_heads=8, rope=dsl.RoPE(1e4), window=4096)
    block = dsl.Block(attn=attn, ffn=dsl.GatedMLP(14336), norm=dsl.RMSNorm(1e-5))
    model = dsl.Decoder(vocab=32000, dim=4096, layers=32, block=block)
    graph = model.graph()
    assert graph.params["layers.31.attn.k.weight"].shape == (1024, 4096)
    assert str(model) == (
        "Decoder(vocab=32000, dim=4096, layers=32, block=Block(attn=Attention(heads=32, kv_heads=8, rope=RoPE(), "
        "window=4096), ffn=GatedMLP(hidden=14336), norm=RMSNorm(eps=1e-05)))"
    )


def test_decoder_options(rng: np.random.Generator) -> None:
    model = dsl.Decoder(
        *(11, 8, 1),
        dsl.Block(dsl.Attention(2)),
        positions=dsl.LearnedPositions(7),
        embed_scale=3.0,
        embed_norm=dsl.RMSNorm(),
        final_norm=False,
        head_bias=True,
        logit_scale=0.25,
        logit_softcap=5.0,
    )
    graph = model.graph(name="odd")
    verify(graph, recipes=True)
    assert (graph.name, graph.meta["context"], graph.meta["max_positions"]) == ("odd", 7, 7)
    assert list(graph.inputs) == ["input_ids", "position_ids"]
    assert "final_norm.weight" not in graph.params
    params = {n: rng.standard_normal(p.shape) for n, p in graph.params.items()}
    params["layers.0.attn.o.weight"] *= 0
    ids, at = np.array([[1, 5, 10]]), np.array([[0, 1, 2]])
    logits = interpret(graph, {"input_ids": ids, "position_ids": at}, params=params)["logits"]
    x = rms_norm(params["embed.weight"][ids] * 3 + params["positions.weight"][at], params["embed_norm.weight"])
    raw = (x @ params["lm_head.weight"].T + params["lm_head.bias"]) * 0.25
    close(logits, 5 * np.tanh(raw / 5))


def test_final_norm_follows_the_block() -> None:
    last = dsl.Decoder(10, 8, [dsl.Block(dsl.Attention(2), norm=dsl.LayerNorm(1e-3))]).graph()
    assert [n.op.name for n in last.nodes if n.output.name == "final_norm"] == ["layer_norm"]
    post = dsl.Decoder(10, 8, 1, dsl.Block(dsl.Attention(2), arrangement="post")).graph()
    assert "final_norm.weight" not in post.params
    assert "position_ids" not in post.inputs


def test_encoder_with_rope_computes_positions() -> None:
    block = dsl.Block(dsl.Attention(2, rope=dsl.RoPE()), dsl.MLP(8))
    graph = dsl.Encoder(10, 8, 2, block, final_norm=dsl.RMSNorm()).graph()
    verify(graph, recipes=True)
    assert list(graph.inputs) == ["input_ids", "attention_mask"]
    assert list(graph.outputs) == ["last_hidden_state"]
    attention = [n for n in graph.nodes if n.op is ops.attention]
    assert all(n.operand("key_mask") is graph.inputs["attention_mask"] and not n.attrs["causal"] for n in attention)
    assert "iota" not in {n.op.name for n in dsl.Encoder(10, 8, 1, dsl.Block(dsl.Attention(2))).graph().nodes}
