"""Tiny random models of every family, all parameters randomized: full pass and cached decode against transformers.

Sequences of 24 tokens cross a window of 8; decoders run as one full pass, as chunks, and token by token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx.reference import ReferenceEvaluator

import weft
from weft.backends.runtime.generate import Generator

LENGTH, WINDOW, VOCAB = 24, 8, 96
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GQA, MHA = {"num_key_value_heads": 2}, {"num_key_value_heads": 4}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
GPT2 = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa-tied": ("Llama", COMMON | GQA | TIED),
    "llama-mha-biases": ("Llama", COMMON | MHA | UNTIED | {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-head": ("Llama", COMMON | GQA | UNTIED | {"head_dim": 12}),
    "mistral-window-gqa": ("Mistral", COMMON | GQA | UNTIED | {"sliding_window": WINDOW, "head_dim": 16}),
    "mistral-window-mha-tied": ("Mistral", COMMON | MHA | TIED | {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2-gqa-tied": ("Qwen2", COMMON | GQA | TIED),
    "qwen2-window-mha": ("Qwen2", COMMON | MHA | UNTIED | SLIDING),
    "qwen3-gqa": ("Qwen3", COMMON | GQA | UNTIED | {"head_dim": 32}),
    "qwen3-window-mha-tied": ("Qwen3", COMMON | MHA | TIED | SLIDING | {"head_dim": 16, "attention_bias": True}),
    "gpt2-tied": ("GPT2", GPT2),
    "gpt2-untied": ("GPT2", GPT2 | UNTIED),
    "olmo2-gqa": ("Olmo2", COMMON | GQA | UNTIED),
}


def randomized(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Every parameter drawn anew: norms around one, biases and weights around zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2 * noise if "norm" in name.lower() and p.ndim == 1 and "bias" not in name else 0.15 * noise)
    return model.eval()


def decoder(name: str, folder: Path) -> torch.nn.Module:
    family, settings = DECODERS[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    config._attn_implementation = "eager"
    class_name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = randomized(getattr(transformers, class_name)(config))
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


def hf_logits(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.from_numpy(ids)).logits.numpy()


def close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-4 * max(1.0, np.abs(want).max())


@pytest.mark.parametrize("target", ["ort-cpu", "onnx"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_equals_transformers(name: str, target: str, tmp_path: Path) -> None:
    model = decoder(name, tmp_path / "hf")
    ids = np.random.default_rng(1).integers(3, VOCAB, (1, LENGTH))
    want = hf_logits(model, ids)[0]
    report = weft.compile(tmp_path / "hf", tmp_path / "all", target=target, passes="default,-last-token-logits")
    assert report.model.unread == []
    everything = weft.load(tmp_path / "all")
    for chunk in (LENGTH, 5, 1):  # one full pass; chunks over the border of the window; token by token
        close(everything.logits(ids[0].tolist(), chunk=chunk), want)
    weft.compile(tmp_path / "hf", tmp_path / "last", target=target)
    last = weft.load(tmp_path / "last")
    close(last.logits(ids[0].tolist(), chunk=1), want)


@pytest.mark.parametrize("target", ["ort-cpu", "onnx"])
@pytest.mark.parametrize("name", ["mistral-window-gqa", "gpt2-tied", "qwen3-gqa"])
def test_greedy_batches_equal_transformers(name: str, target: str, tmp_path: Path) -> None:
    model = decoder(name, tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out", target=target)
    loaded = weft.load(tmp_path / "out")
    ours = Generator(loaded.decoder)
    rng = np.random.default_rng(3)
    rows = [rng.integers(3, VOCAB, n).tolist() for n in (3, 11, 7)]
    want = []
    for row in rows:
        ids = torch.tensor([row])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        want.append(out[0, len(row) :].tolist())
    for chunk in (64, 4):  # padded together; row by row
        assert [r.tokens for r in ours.generate(rows, max_tokens=12, chunk=chunk)] == want


@pytest.mark.parametrize("pooler", [True, False])
@pytest.mark.parametrize("target", ["ort-cpu", "onnx"])
def test_bert_equals_transformers(target: str, pooler: bool, tmp_path: Path) -> None:
    config = transformers.BertConfig(**{**COMMON, "type_vocab_size": 2, "hidden_act": "gelu"})
    config._attn_implementation = "eager"
    model = randomized(transformers.BertModel(config, add_pooling_layer=pooler))
    model.save_pretrained(tmp_path / "hf")
    rng = np.random.default_rng(1)
    ids = rng.integers(3, VOCAB, (3, LENGTH))
    mask = (np.arange(LENGTH) < np.array([[LENGTH], [9], [1]])).astype(np.int64)
    types = rng.integers(0, 2, ids.shape)
    with torch.inference_mode():
        arguments = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        want = model(**{k: torch.from_numpy(v) for k, v in arguments.items()})
    weft.compile(tmp_path / "hf", tmp_path / "out", target=target)
    import onnxruntime as ort

    session = ort.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    got = dict(zip([o.name for o in session.get_outputs()], session.run(None, arguments), strict=True))
    valid = mask.astype(bool)
    close(got["last_hidden_state"][valid], want.last_hidden_state.numpy()[valid])
    assert ("pooler_output" in got) == pooler
    if pooler:
        close(got["pooler_output"], want.pooler_output.numpy())


@pytest.mark.parametrize("name", ["llama-gqa-tied", "mistral-window-gqa", "qwen3-gqa", "gpt2-untied"])
def test_the_onnx_target_is_standard(name: str, tmp_path: Path) -> None:
    """Checked in full, default domain only, equal in ONNX Runtime and in onnx's reference evaluator."""
    import onnxruntime as ort

    decoder(name, tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out", target="onnx")
    path = tmp_path / "out" / "model.onnx"
    onnx.checker.check_model(path, full_check=True)
    proto = onnx.load(path)
    assert {n.domain for n in proto.graph.node} == {""}
    assert [(o.domain, o.version) for o in proto.opset_import] == [("", 24)]
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(5)
    seq, past, capacity = 6, 9, 20
    shapes = {"batch": 2, "seq": seq, "total": past + seq, "capacity": capacity}
    feeds: dict[str, np.ndarray] = {}
    for i in session.get_inputs():
        shape = [shapes.get(s, s) for s in i.shape]
        feeds[i.name] = rng.standard_normal(shape).astype(np.float32) if "float" in i.type else np.ones(shape, np.int64)
    feeds["input_ids"] = rng.integers(3, VOCAB, (2, seq))
    feeds["position_ids"] = np.broadcast_to(np.arange(past, past + seq), (2, seq)).copy()
    theirs = ReferenceEvaluator(proto).run(None, feeds)
    for output, want, got in zip(session.get_outputs(), theirs, session.run(None, feeds), strict=True):
        assert np.abs(got - want).max() <= 1e-4 * max(1.0, np.abs(want).max()), output.name
