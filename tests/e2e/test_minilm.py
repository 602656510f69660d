"""all-MiniLM-L6-v2, real weights: sentence embeddings against transformers' BertModel and mean pooling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import weft

TEXTS = [
    "A cat sits on the mat.",
    "The feline rests upon the rug, which is to say: somebody's carpet, bought years ago in a small shop by the sea.",
    "Stock prices fell sharply on Monday.",
    "x",
]


@pytest.mark.parametrize("target", ["ort-cpu", "onnx"])
def test_sentence_embeddings_equal_transformers(minilm_folder: Path, tmp_path: Path, target: str) -> None:
    from transformers import AutoTokenizer, BertModel

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder)
    bert = BertModel.from_pretrained(minilm_folder, dtype=torch.float32).eval()
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = bert(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    want = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy()

    weft.compile(minilm_folder, tmp_path / "minilm", target=target)
    encoder = weft.load(tmp_path / "minilm")
    got = encoder.encode(TEXTS)  # its folder says: the mean, of unit length
    assert np.abs(got - want).max() <= 1e-5
    similarity = got @ got.T
    assert similarity[0, 1] > similarity[0, 2] + 0.2
