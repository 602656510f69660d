"""Encoders of images, and of the texts beside them, against transformers: ONNX Runtime and PyTorch, all random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

import weft
from weft.frontends.models.tables.verified import Errors

from .families import LENGTH, VOCAB, Row, error
from .images import IMAGES, TEXTS
from .test_families import note
from .unknowns import check_left_out


def check(row: Row, folder: Path, target: str, feeds: dict[str, np.ndarray], errors: Errors) -> None:
    """Check that the model of `row` makes of `feeds` what transformers makes."""
    model = row.save(folder / "hf")
    loaded = weft.load_source(folder / "hf")
    assert loaded.unread == []
    given = {name: torch.from_numpy(value) for name, value in feeds.items()}
    if row.family == "vit_mae":  # which shuffles patches by noise; masking none, it still would
        given["noise"] = torch.arange(9.0).expand(3, -1)
    with torch.inference_mode():
        made = model(**given)
    want = {name: made[name].numpy() for name in loaded.graph.outputs}
    got: dict[str, Any]
    if target == "torch":
        net = weft.torch(loaded)
        with torch.inference_mode():
            outputs = net(*(torch.from_numpy(feeds[name]) for name in loaded.graph.inputs))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        got = dict(zip(loaded.graph.outputs, (o.numpy() for o in outputs), strict=True))
        check_left_out(folder / "hf")
    else:
        weft.compile(loaded, folder / "out", target=target)
        session = ort.InferenceSession(folder / "out" / "model.onnx", providers=["CPUExecutionProvider"])
        got = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    note(errors, row.family, target, "full", max(error(got[name], value) for name, value in want.items()))


@pytest.mark.parametrize("target", ["onnx", "ort-cpu", "torch"])
@pytest.mark.parametrize("name", IMAGES)
def test_images_equal_transformers(name: str, target: str, errors: Errors, tmp_path: Path) -> None:
    row = IMAGES[name]
    channels = row.config.get("num_channels", 3)
    pixels = np.random.default_rng(1).standard_normal((3, channels, 24, 24)).astype(np.float32)
    check(row, tmp_path, target, {"pixel_values": pixels}, errors)


@pytest.mark.parametrize("target", ["onnx", "ort-cpu", "torch"])
@pytest.mark.parametrize("name", TEXTS)
def test_texts_beside_images_equal_transformers(name: str, target: str, errors: Errors, tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(3, VOCAB, (3, LENGTH))
    check(TEXTS[name], tmp_path, target, {"input_ids": ids, "attention_mask": np.ones_like(ids)}, errors)
