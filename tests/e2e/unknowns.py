"""Folders with parts that no family knows: each must be named as left out, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from weft.frontends import load_source

KEY, TENSOR, FILE = "attention_magic", "magic.projection.weight", "magic_head.json"


def check_left_out(folder: Path) -> None:
    """Check that nothing of `folder` is left out, and that an unknown key, tensor and file added to it are."""
    assert _names(folder) == set()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, KEY: 3}))
    (folder / FILE).write_text("{}")
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        from safetensors import safe_open

        with safe_open(folder / "model-00001-of-00002.safetensors", "np") as file:
            index.write_text(json.dumps({"weight_map": dict.fromkeys(file.keys(), "model-00001-of-00002.safetensors")}))
    listed = json.loads(index.read_text())
    save_file({TENSOR: np.ones(2, np.float32)}, folder / "magic.safetensors")
    index.write_text(json.dumps({**listed, "weight_map": {**listed["weight_map"], TENSOR: "magic.safetensors"}}))
    assert _names(folder) == {("key", KEY), ("tensors", "magic"), ("file", FILE)}


def _names(folder: Path) -> set[tuple[str, str]]:
    """Parts left out by kind and name, except Blenderbot's default of generation."""
    parts = {(part.kind, part.name) for part in load_source(folder).left_out}
    return parts - {("key", "generation_config.json:encoder_no_repeat_ngram_size")}
