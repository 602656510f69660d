"""Graphs written as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

from ...conftest import Save
from ..codes import export_with_notes, quantize


def test_codes_that_transformers_cannot_load_are_dequantized(save: Save, tmp_path: Path) -> None:
    """Its layers multiply by their `weight`, which transformers takes away from layers with codes."""
    _, folder = save("falcon", new_decoder_architecture=True, num_kv_heads=2)
    model = quantize(folder, group=16)
    (note,) = export_with_notes(model, tmp_path / "out")
    assert note == "all weights are written as floats: transformers cannot load codes of falcon models"
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert (
        export_with_notes(model, tmp_path / "codes", weights="codes")[0]
        == "weights that keep their codes: 12 as uint4_16"
    )
