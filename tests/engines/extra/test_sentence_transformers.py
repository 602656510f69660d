"""sentence-transformers loads folders of encoders; its embeddings are weft's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

import weft

from ..compiled import loaded

TEXTS = [
    "A cat sits on the mat.",
    "The feline rests upon the rug, which is to say: somebody's carpet, bought years ago in a small shop by the sea.",
    "x",
]


def test_embeddings_of_a_folder(minilm_folder: Path, tmp_path: Path) -> None:
    """With the pooling and the length that the folder's source names; `AutoModel` returns them, too."""
    weft.compile(minilm_folder, tmp_path / "folder", target="transformers", dtype="f32")
    found = SentenceTransformer(str(tmp_path / "folder"), device="cpu", trust_remote_code=True)
    assert [type(module).__name__ for module in found] == ["Transformer", "Pooling", "Normalize"]
    assert type(found[0].model).__module__.startswith("transformers_modules")
    embeddings = found.encode(TEXTS, batch_size=3)
    weft.compile(tmp_path / "folder", tmp_path / "onnx")
    assert np.abs(embeddings - weft.load(tmp_path / "onnx").encode(TEXTS)).max() <= 1e-5
    original = SentenceTransformer(str(minilm_folder), device="cpu")
    assert np.abs(embeddings - original.encode(TEXTS, batch_size=3)).max() <= 1e-5
    given = found[0].tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        made = loaded(tmp_path / "folder", "AutoModel")(**given)
    assert [*made] == ["last_hidden_state", "pooler_output", "sentence_embedding"]
    assert np.abs(made.sentence_embedding.numpy() - embeddings).max() <= 1e-5
    assert np.abs(np.linalg.norm(embeddings, axis=1) - 1).max() <= 1e-5
