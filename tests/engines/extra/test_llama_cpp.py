"""llama.cpp runs what weft exports of a folder as GGUF: it has the probabilities of weft, and writes the same text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import xllamacpp

import weft

from ...frontends.formats.hf.peft_models import save_base

PROMPTS = ("The capital of France is", "Once upon a time, there was a")
NEW = 12
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 32},
    "Gemma2ForCausalLM": {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
}


def test_llama_cpp_generates_the_tokens_of_smollm2(smollm2: Path, tmp_path: Path) -> None:
    check(smollm2, tmp_path)


@pytest.mark.parametrize("kind", FAMILIES)
def test_llama_cpp_generates_the_tokens_of_other_families(kind: str, smollm2: Path, tmp_path: Path) -> None:
    """Random weights, with the tokenizer of SmolLM2."""
    sizes = {"vocab_size": 49152, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    base = save_base(tmp_path / "base", kind, **sizes, intermediate_size=96, **FAMILIES[kind])
    for file in smollm2.glob("*token*"):
        shutil.copy(file, base)
    weft.compile(base, tmp_path / "folder", target="transformers")
    check(tmp_path / "folder", tmp_path)


def check(folder: Path, out: Path) -> None:
    """Check that llama.cpp and ONNX Runtime continue prompts with the same text."""
    weft.export(folder, out / "model.gguf", dtype="f32")
    params = xllamacpp.CommonParams()
    params.model.path = str(out / "model.gguf")
    params.n_ctx, params.n_predict, params.warmup = 256, NEW, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    weft.compile(folder, out / "onnx")
    ours = weft.load(out / "onnx")
    assert not weft.bisect(folder, f"llama.cpp:{out / 'model.gguf'}").differs
    for prompt in PROMPTS:
        request = {"prompt": prompt, "temperature": 0, "max_tokens": NEW, "cache_prompt": False}
        theirs = server.handle_completions(request)["choices"][0]["text"]
        assert theirs and theirs == ours.generate(prompt, max_tokens=NEW)[0].text
