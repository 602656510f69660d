"""onnxruntime-genai runs the folders of every family whose caches it knows, and generates what transformers does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime_genai as og
import pytest

import weft
from weft.ir.op import StateKind
from weft.passes.analysis.states import find_state_inputs

from ..sampling import each
from .families import LENGTH, VARIED, VOCAB, reference

DECODERS = [name for name, row in VARIED.items() if row.is_decoder]
# Values of another width than the keys, in one more cache, or of other numbers of heads in other layers.
UNLIKE = ("diffllama", "doge", "mimo_v2_flash")
PROMPT = 10  # tokens, more than the windows hold
CASES = [
    *((name, "ort-cpu") for name in each(5, DECODERS)),
    *((name, "onnx") for name in ("gpt2-tied", "mistral-gqa", "gemma2", "mixtral", "gpt-oss", "deepseek-v3", "jamba")),
]


def generated(folder: Path, prompt: list[int], length: int = LENGTH) -> list[int]:
    """`prompt` and what follows it, up to `length` tokens, greedily."""
    config = json.loads((folder / "genai_config.json").read_text())
    assert config["model"]["type"] == "decoder"
    params = og.GeneratorParams(model := og.Model(str(folder)))
    params.set_search_options(max_length=length, min_length=length, do_sample=False)
    generator = og.Generator(model, params)
    generator.append_tokens(prompt)
    while not generator.is_done():
        generator.generate_next_token()
    return [int(t) for t in generator.get_sequence(0)]


@pytest.mark.halved
@pytest.mark.parametrize(("name", "target"), CASES)
def test_genai_generates_the_tokens_of_transformers(name: str, target: str, tmp_path: Path) -> None:
    row = VARIED[name]
    model = row.save(tmp_path / "hf")
    report = weft.compile(tmp_path / "hf", tmp_path / "out", target=target, max_length=LENGTH)
    kinds = {spec.kind for spec, _, _ in find_state_inputs(report.graph)}
    known = kinds == {StateKind.KV} and row.family not in UNLIKE  # neither latent caches nor states of recurrences
    assert (tmp_path / "out" / "genai_config.json").is_file() == known
    assert any("onnxruntime-genai cannot run this model" in note for note in report.notes) != known
    if not known:
        return
    prompt = np.random.default_rng(4).integers(3, VOCAB, PROMPT).tolist()
    found = generated(tmp_path / "out", prompt)
    assert (found[:PROMPT], len(found)) == (prompt, LENGTH)
    logits = reference(model, np.array([found]))[0, PROMPT - 1 : -1]
    logits[:, report.graph.meta["eos_token_ids"]] = -np.inf  # not before LENGTH tokens
    assert logits.argmax(-1).tolist() == found[PROMPT:]
