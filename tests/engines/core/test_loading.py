"""A folder saved elsewhere with its code, and compiled by PyTorch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ...sampling import each
from ..compiled import compiled, error, loaded, reference, texts


@pytest.mark.parametrize("auto", ["AutoModelForCausalLM", "AutoModel", "AutoModelForSequenceClassification"])
def test_saved_elsewhere_with_its_code(auto: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", each(2, ["preset/smollm2-135m", "preset/mixtral-8x7b"]))
def test_compiles_as_one_graph(name: str, tmp_path: Path) -> None:
    """Without breaks, at lengths that differ, and backward."""
    model = loaded(compiled(name, tmp_path / "folder")).train()
    fast: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seq in (8, 8, 11):
        ids, gradients = texts(2, seq, 37), []
        for net in (model, fast):
            model.zero_grad()
            net(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert error(gradients[1], gradients[0]) <= 1e-5
    torch.compiler.reset()


def test_starts_anew_from_the_config(tmp_path: Path) -> None:
    """On the meta device, too, as tools do that divide a model before it has weights."""
    folder = compiled("preset/smollm2-135m", tmp_path / "folder")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True, num_hidden_layers=3)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert {p.device.type for p in model.parameters()} == {"meta"} and len(model.model.layers) == 3
    assert model._no_split_modules and model.model._no_split_modules
