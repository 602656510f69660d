"""Values inside models in ONNX Runtime: those of the interpreter, and of transformers with hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft import Attention, Block, CrossAttention, Decoder, Encoder, EncoderDecoder, GatedMLP, Mamba, MoE, RMSNorm
from weft.frontends.app.api.observe.trace import Scales, open_tracer, trace_text
from weft.ir import WeftError

IDS = [3, 1, 4, 1, 5, 9]
KINDS = {
    "experts": Block(Attention(4, 2, window=3, sinks=True), MoE(3, 16, 2), RMSNorm()),
    "recurrent": Block(Mamba(24, state=4), GatedMLP(24), RMSNorm()),
}


def decoder(kind: str) -> Any:
    return Decoder(11, 16, 2, KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_onnx_runtime_returns_what_the_interpreter_returns(kind: str) -> None:
    one, exact = (trace_text(decoder(kind), IDS, exact=exact) for exact in (False, True))
    assert (one.ids, one.tokens) == ((*IDS,), ("3", "1", "4", "1", "5", "9"))
    assert list(one.values) == list(exact.values)
    assert len(one.of("residual")) == 3
    assert bool(one.of("routes")) == bool(one.of("attention")) == (kind == "experts") != bool(one.of("states"))
    for name, array in exact.values.items():
        np.testing.assert_allclose(one.values[name], array, atol=2e-6, err_msg=name)


def test_scaled_parts() -> None:
    with open_tracer(decoder("experts"), "residual", ablate=True) as tracer:
        assert {name.partition(".")[0] for name in tracer.inputs} == {"heads", "experts", "sublayers"}
        plain = tracer.trace(IDS).of("residual")
        without = tracer.trace(IDS, {"sublayers.layers.0.attn": 0, "sublayers.layers.0.ffn": 0.0}).of("residual")
        np.testing.assert_array_equal(without["layers.0"], plain["layers"])
        heads = [tracer.trace(IDS, {"heads.layers.1.attn": factors}) for factors in ({2: 0.0}, [1, 1, 0, 1])]
        np.testing.assert_array_equal(*(t.values["logits"] for t in heads))
        assert np.abs(heads[0].of("residual")["layers.1"] - plain["layers.1"]).max() > 1e-6
        refused: tuple[tuple[Scales, str], ...] = (
            ({"heads.layers.1.atn": 0.0}, r"unknown part 'heads.layers.1.atn'; did you mean heads.layers.1.attn"),
            ({"heads.layers.1.attn": {4: 0.0}}, r"heads.layers.1.attn has no 4: it has 4, from 0 on"),
            ({"heads.layers.1.attn": [0.0, 1.0]}, r"heads.layers.1.attn takes 4 factors, not 2"),
        )
        for scales, why in refused:
            with pytest.raises(WeftError, match=why):
                tracer.trace(IDS, scales)


def test_an_encoder_decoder_reads_a_source() -> None:
    reads = Block(Attention(2), GatedMLP(24), RMSNorm())
    writes = Block(Attention(2), GatedMLP(24), RMSNorm(), cross=CrossAttention(2))
    model = EncoderDecoder(Encoder(11, 16, 1, reads), Decoder(11, 16, 1, writes))
    with open_tracer(model) as tracer:
        weights = tracer.trace([1, 2], source=[3, 4, 5]).of("attention")
    shapes = {
        "encoder.layers.0.attn": (2, 3, 3),
        "decoder.layers.0.attn": (2, 2, 2),
        "decoder.layers.0.cross": (2, 2, 3),
    }
    assert {name: array.shape for name, array in weights.items()} == shapes


def test_texts_need_a_tokenizer_and_tokens() -> None:
    with pytest.raises(WeftError, match="has no tokenizer to read a text with: give token ids"):
        trace_text(decoder("experts"), "a text")
    with pytest.raises(WeftError, match="the text has no tokens: give a longer one"):
        trace_text(decoder("experts"), [])


@pytest.mark.long
def test_smollm2_equals_transformers_with_hooks(smollm2_gguf: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    weft.export(smollm2_gguf, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").float()
    with open_tracer(smollm2_gguf, ablate=True) as tracer:
        traced = tracer.trace("When Mary and John went to the store, John gave a drink to")
        ids = torch.tensor([traced.ids])
        with torch.inference_mode():
            want = model(ids, output_attentions=True, output_hidden_states=True)
            for ours, theirs in zip(traced.of("attention").values(), want.attentions, strict=True):
                assert np.abs(ours - theirs[0].numpy()).max() < 1e-4
            lens = [model.lm_head(model.model.norm(state))[0] for state in want.hidden_states[1:-1]]
            for ours, logits in zip(traced.of("logits").values(), [*lens, want.logits[0]], strict=True):
                chances = [np.exp(x - x.max(-1, keepdims=True)) for x in (ours, logits.numpy())]
                ours, theirs = (x / x.sum(-1, keepdims=True) for x in chances)
                assert np.abs(ours - theirs).max() < 1e-4
            projection = model.model.layers[4].self_attn.o_proj
            scale = torch.ones(model.config.hidden_size)
            scale[: model.config.head_dim] = 0
            projection.register_forward_pre_hook(lambda module, args: (args[0] * scale,))
            logits = model(ids).logits[0].numpy()
        ours = tracer.trace(list(traced.ids), {"heads.layers.4.attn": {0: 0.0}}).values["logits"]
    assert np.abs(ours - logits).max() < 1e-4 * np.abs(logits).max()
    assert np.abs(ours - traced.values["logits"]).max() > 0.01
