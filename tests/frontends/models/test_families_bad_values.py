"""Configs whose values are null, of another type or out of range: one sentence that names the file and the key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from weft.frontends import load_source
from weft.frontends.models.families import FAMILIES, load
from weft.ir import WeftError
from weft.ir.recipes.readers import MemoryReader

from ...e2e.families import ROWS
from ...e2e.seq2seq import SEQ2SEQ
from ...sampling import each

BAD: list[Any] = [None, "x", [], {}, -1, 0, 1.5, True, False, float("nan")]
MUTATIONS = 15  # of each row's config


def config_of(name: str) -> dict[str, Any]:
    """The whole config of a row of the table of families."""
    row: Any = {**ROWS, **SEQ2SEQ}[name]
    made = getattr(transformers, row.model).config_class(**row.config)
    found: dict[str, Any] = json.loads(made.to_json_string(use_diff=False))
    return found


def places(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every key of a config, in the mapping that holds it."""
    for key, value in config.items():
        yield config, key
        if isinstance(value, dict):
            yield from places(value)


def failure(config: dict[str, Any]) -> str:
    """Return the error for a config with an empty checkpoint."""
    with pytest.raises(WeftError) as e:
        load(FAMILIES[config["model_type"]], config, MemoryReader({}), "config.json")
    return str(e.value)


@pytest.mark.halved
@pytest.mark.parametrize("name", each(8, [*ROWS, *SEQ2SEQ]))
def test_invalid_config_values_are_read_or_refused(name: str) -> None:
    rng = np.random.default_rng(0)
    text = json.dumps(config_of(name))
    for _ in range(MUTATIONS):
        config = json.loads(text)
        found = [(inner, key) for inner, key in places(config) if key != "model_type"]
        inner, key = found[rng.integers(len(found))]
        inner[key] = BAD[rng.integers(len(BAD))]
        assert "\n" not in failure(config)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama-gqa-tied", "hidden_size", "x"),
        ("llama-gqa-tied", "num_key_value_heads", 0),
        ("llama-gqa-tied", "rms_norm_eps", []),
        ("deepseek-v3", "routed_scaling_factor", None),
        ("deepseek-v3", "n_group", None),
        ("deepseek-v3", "topk_group", None),
        ("qwen3-moe", "decoder_sparse_step", None),
        ("bamba", "mamba_expand", None),
        ("bamba", "attn_layer_indices", -1),
        ("granite", "logits_scaling", None),
        ("granite", "logits_scaling", 0),
        ("gemma2", "final_logit_softcapping", 0),
        ("gemma2", "query_pre_attn_scalar", "x"),
        ("gpt2-tied", "n_head", 0),
    ],
)
def test_refusal_names_the_config_key(name: str, key: str, value: Any) -> None:
    assert failure({**config_of(name), key: value}).startswith(f"config.json: {key}={value!r}: ")


@pytest.mark.parametrize("model_type", [[], None, 3, {}])
def test_invalid_model_type_is_refused(model_type: Any, save: Any) -> None:
    folder: Path = save("llama")[1]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    with pytest.raises(WeftError, match=r"config.json: model_type .* is not known"):
        load_source(folder)
