"""embed.py of a folder: vectors of texts, as the runtime computes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import weft
from weft.backends.runtime.ort.ort_encoder import EncoderModel as Runner

from .....passes.zoo import ZOO
from .conftest import Script
from .scripts import compiled


def test_embeddings_equal_those_of_the_runtime(script: Script, tmp_path: Path) -> None:
    folder = compiled(ZOO["preset/bert-base"](), tmp_path / "out")
    model = weft.load(folder, device="cpu", trust=True)
    assert isinstance(model, Runner)
    for pooling in ("mean", "cls", "max"):
        status, out, _ = script(folder / "embed.py", "--ids", "3,4,5", "--ids", "7,8", "--pooling", pooling)
        vectors = [json.loads(line) for line in out.splitlines()]
        eps = np.finfo(np.float32).eps * 36**0.5
        for vector, ids in zip(vectors, ([3, 4, 5], [7, 8]), strict=True):
            np.testing.assert_allclose(vector, model.encode([ids], pooling=pooling)[0], atol=16 * eps)
        assert status == 0 and len(vectors) == 2
    assert "give texts, or --ids" in script(folder / "embed.py")[2]
