"""Sources with adapters to merge: the base of an adapter, the merged weights, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weft
from weft.frontends.app.api.source.adapters import load_with_adapters
from weft.ir import WeftError

QUERY = "model.layers.0.self_attn.q_proj"


def write_adapter(folder: Path, **config: Any) -> Path:
    """Write a LoRA adapter of rank 1 for the query projection of the first layer."""
    folder.mkdir()
    lora = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(lora))
    factors = {"lora_A": np.full((1, 32), 0.5, np.float32), "lora_B": np.arange(32, dtype=np.float32)[:, None]}
    save_file(
        {f"base_model.model.{QUERY}.{name}.weight": x for name, x in factors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


@pytest.fixture
def base(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a base model; from the working directory its name, ``../base``, leads nowhere, only from the adapter."""
    monkeypatch.chdir(tmp_path)
    weft.export(tiny, tmp_path / "base")
    return tmp_path / "base"


def test_adapter_is_merged_into_its_base(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path="../base")
    by_base, by_adapter = load_with_adapters(base, [adapter]), load_with_adapters(adapter)
    assert by_base.description == by_adapter.description == "Hugging Face folder base with adapter adapter"
    assert by_base.adapters == by_adapter.adapters == (adapter,)
    files = {file.resolve() for file in by_adapter.files}
    assert {base / "config.json", base / "model.safetensors", adapter / "adapter_model.safetensors"} <= files
    weight = load_file(base / "model.safetensors")[f"{QUERY}.weight"]
    wanted = weight + 2 * np.arange(32)[:, None] * 0.5  # alpha / rank · B A
    for model in (by_base, by_adapter):
        param = model.graph.params["layers.0.attn.q.weight"]
        np.testing.assert_allclose(param.recipe.evaluate(model.graph.reader), wanted, rtol=1e-6)


def test_family_overrides_that_of_the_config(base: Path) -> None:
    assert load_with_adapters(base, family="mistral").graph.meta["model_type"] == "mistral"
    assert load_with_adapters(base).adapters == ()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "is an adapter which does not name its base"),
        ({"base_model_name_or_path": 7}, "base_model_name_or_path=7 is not a string"),
        ({"base_model_name_or_path": "else/where"}, "whose base 'else/where' is not available locally"),
        ({"base_model_name_or_path": "../empty"}, "is not a Hugging Face model folder"),
        ({"base_model_name_or_path": "../base", "revision": "v2"}, "requires revision='v2' of its base"),
    ],
)
def test_adapters_without_a_usable_base_are_refused(
    base: Path, tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeftError, match=words):
        load_with_adapters(write_adapter(tmp_path / "adapter", **config))


def test_sources_that_take_no_adapter_are_refused(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    with pytest.raises(WeftError, match=r"--adapter needs a Hugging Face folder .*, and gpt2 is not one"):
        load_with_adapters("gpt2", [adapter])
    with pytest.raises(WeftError, match="--as needs a Hugging Face folder, and gpt2 is not one"):
        load_with_adapters("gpt2", family="llama")
    with pytest.raises(WeftError, match="is not an adapter: no folder of that name contains adapter_config"):
        load_with_adapters(base, [base])
