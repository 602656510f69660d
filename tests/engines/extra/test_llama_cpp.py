"""llama.cpp runs what weft exports of a folder as GGUF, and writes the text that weft writes."""

from __future__ import annotations

from pathlib import Path

import xllamacpp

import weft

PROMPTS = ("The capital of France is", "Once upon a time, there was a")
NEW = 12


def test_greedy_text_of_real_weights(smollm2: Path, tmp_path: Path) -> None:
    weft.export(smollm2, tmp_path / "model.gguf", dtype="f32")
    params = xllamacpp.CommonParams()
    params.model.path = str(tmp_path / "model.gguf")
    params.n_ctx, params.n_predict, params.warmup = 256, NEW, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    weft.compile(smollm2, tmp_path / "onnx")
    ours = weft.load(tmp_path / "onnx")
    for prompt in PROMPTS:
        request = {"prompt": prompt, "temperature": 0, "max_tokens": NEW, "cache_prompt": False}
        theirs = server.handle_completions(request)
        assert theirs["choices"][0]["text"] == ours.generate(prompt, max_tokens=NEW)[0].text
