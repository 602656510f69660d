"""The same models as folders of ONNX and of PyTorch: the same tokens, logits and embeddings from weft's runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft.backends.alignment.traces import compute_error
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.ort.ort_encoder import EncoderModel
from weft.frontends.app.api.verify.error_bounds import compute_tolerance

from ....passes.zoo import ZOO
from ....sampling import each

LONGEST = 19
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3]]
DECODERS = [
    "family/gemma3",
    "preset/deepseek-v3",
    "preset/gpt3-175b",
    "preset/mamba-130m",
    "variant/Mamba-2 in groups",
    "variant/ALiBi",
    "variant/sinks",
    "variant/experts that choose",
    "preset/t5-base",
    "variant/encoder-decoder",
]
OPTIONS: list[dict[str, Any]] = [{}, {"chunk": 3}, {"beams": 3}, {"temperature": 1.0, "top_k": 9, "seed": 3}]


def both(name: str, folder: Path) -> list[Any]:
    """Open the model as PyTorch and as ONNX."""
    for target in ("torch", "ort-cpu"):
        weft.compile(ZOO[name](), folder / target, target=target, max_length=LONGEST)
    return [weft.load(folder / target, device="cpu", trust=True) for target in ("torch", "ort-cpu")]


@pytest.mark.parametrize("name", each(2, DECODERS))
def test_language_models_agree_with_onnx(name: str, tmp_path: Path) -> None:
    models = both(name, tmp_path)
    for model in models:
        assert isinstance(model, Generator)
        model.stop_ids = frozenset()  # texts do not end early
    for options in OPTIONS:
        ours, theirs = ([r.tokens for r in m.generate(PROMPTS, max_tokens=8, **options)] for m in models)
        assert ours == theirs, options
    tolerance = compute_tolerance("f32", layers=4, reduction=64)
    with models[0].decoder.context(3, LONGEST) as mine, models[1].decoder.context(3, LONGEST) as other:
        assert compute_error(mine.prefill(PROMPTS), other.prefill(PROMPTS)) <= 2 * tolerance
        for token in range(4):
            got, wanted = (context.step(np.full(3, token)) for context in (mine, other))
            assert compute_error(got, wanted) <= 2 * tolerance


@pytest.mark.parametrize("name", ["preset/bert-base", "variant/encoder, T5 bias"])
def test_encoders_agree_with_onnx(name: str, tmp_path: Path) -> None:
    models = both(name, tmp_path)
    assert all(isinstance(model, EncoderModel) for model in models)
    ours, theirs = (model.encode(PROMPTS) for model in models)
    assert compute_error(ours, theirs) <= 2 * compute_tolerance("f32", layers=2, reduction=64)
