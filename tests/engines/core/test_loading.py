"""A folder saved elsewhere with its code, or begun anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..compiled import compiled, error, loaded, reference, texts


@pytest.mark.parametrize("auto", ["AutoModelForCausalLM", "AutoModel", "AutoModelForSequenceClassification"])
def test_saved_copy_loads_with_its_code(auto: str, tmp_path: Path) -> None:
    """In shards, which need no file of the first folder; weft needs the graph beside them."""
    folder, ids = compiled("preset/mixtral-8x7b", tmp_path / "folder"), texts(2, 9, 37)
    model = loaded(folder, auto)
    model.config.pad_token_id = 0  # by which a classifier finds the last token
    model.save_pretrained(tmp_path / "other", max_shard_size="20KB")
    shutil.move(folder / "model.weft", tmp_path / "other")
    shutil.rmtree(folder)
    assert len(list((tmp_path / "other").glob("*.safetensors"))) > 1
    again = loaded(tmp_path / "other", auto)
    with torch.no_grad():
        made, before = (m(ids, use_cache=False, return_dict=False) for m in (again, model))
    assert torch.equal(made[0], before[0])
    if auto == "AutoModelForCausalLM":
        assert error(made[0], reference(tmp_path / "other", ids)) <= 1e-5


def test_model_from_config_has_new_weights(tmp_path: Path) -> None:
    """On the meta device, too, as tools do that divide a model before it has weights."""
    folder = compiled("preset/smollm2-135m", tmp_path / "folder")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True, num_hidden_layers=3)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert {p.device.type for p in model.parameters()} == {"meta"} and len(model.model.layers) == 3
    assert model._no_split_modules and model.model._no_split_modules
