"""Folders with parts that no family knows: each must be named as left out, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from weft.frontends import load_source
from weft.frontends.formats.hf.contents import OF_TOWERS
from weft.frontends.model import Model
from weft.frontends.models.config_keys import explain

KEY, TENSOR, FILE = "attention_magic", "magic.projection.weight", "magic_head.json"
# What transformers itself writes and weft does not use: a setting of Blenderbot's beam search, and a base of DBRX that
# version 4 rotated by.
CLEAN = {("key", "generation_config.json:encoder_no_repeat_ngram_size"), ("key", "attn_config.rope_theta")}
TOWERS = ("vision tower", "audio tower", "projector")


def check_left_out(folder: Path, model: Model | None = None) -> None:
    """Check that nothing of `folder`, read as `model`, is left out, and that an unknown key in each object of its
    config, an unknown key of generation, an unknown tensor and an unknown file that are added to it are."""
    assert _names(model or load_source(folder)) <= CLEAN
    config = json.loads((folder / "config.json").read_text())
    keys = set(_add_key(config, ""))
    (folder / "config.json").write_text(json.dumps(config))
    generation = folder / "generation_config.json"
    if generation.is_file():
        generation.write_text(json.dumps({**json.loads(generation.read_text()), KEY: 3}))
        keys.add(f"generation_config.json:{KEY}")
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
    added = {*(("key", key) for key in keys), ("tensors", "magic"), ("file", FILE)}
    assert _names(load_source(folder)) - CLEAN == added


def _add_key(config: dict[str, Any], prefix: str) -> list[str]:
    """Add an unknown key to `config` and to the objects in it that mean something; return where."""
    added = [prefix + KEY]
    for name, value in config.items():
        if isinstance(value, dict) and value and not explain(name) and not OF_TOWERS.search(name):
            added += _add_key(value, f"{prefix}{name}.")
    config[KEY] = 3
    return added


def _names(model: Model) -> set[tuple[str, str]]:
    return {(part.kind, part.name) for part in model.left_out if part.kind not in TOWERS}
