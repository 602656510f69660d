"""Settings that a config spells twice: the spelling that counts in transformers counts here, in either order.

The oracle is the config that transformers makes of the same file: read from that, which has one spelling, the settings
must be those that are read from the file.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from weft.frontends import load_source
from weft.frontends.models.families import FAMILIES
from weft.frontends.models.tables.settings import Settings
from weft.ir import WeftError

from ..sampling import each
from .families import ROWS, Row, error, reference
from .mutations import computed, quiet
from .test_families import KNOWN

FIRST: dict[str, Row] = {row.family: row for row in reversed(KNOWN.values())}
DEFAULT, LINEAR = {"rope_type": "default", "rope_theta": 5e4}, {"rope_type": "linear", "factor": 3.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROTARY: dict[str, dict[str, Any]] = {
    "scaling with a base": {"rope_parameters": DEFAULT, "rope_scaling": {**YARN, "rope_theta": 7e3}},
    "scaling without": {"rope_parameters": DEFAULT, "rope_scaling": LINEAR},
    "scaling, base outside": {"rope_parameters": DEFAULT, "rope_scaling": LINEAR, "rope_theta": 123.0},
    "two bases": {"rope_parameters": DEFAULT, "rope_theta": 123.0},
    "base outside": {"rope_parameters": LINEAR, "rope_theta": 123.0},
    "fraction outside": {"rope_parameters": DEFAULT, "partial_rotary_factor": 0.5},
    "two fractions": {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5},
    "two originals": {"rope_parameters": {**YARN, "rope_theta": 1e4}, "original_max_position_embeddings": 24},
    "original outside": {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
        "original_max_position_embeddings": 24,
    },
    "two originals of Llama 3": {
        "rope_parameters": {**LLAMA3, "rope_theta": 1e4},
        "original_max_position_embeddings": 24,
    },
    "two types": {"rope_parameters": {**LINEAR, "type": "yarn", "rope_theta": 1e4}},
    "older type": {"rope_parameters": {"type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    "empty scaling": {"rope_parameters": {**LINEAR, "rope_theta": 2e4}, "rope_scaling": {}},
    "null scaling": {"rope_parameters": {**LINEAR, "rope_theta": 2e4}, "rope_scaling": None},
    "empty parameters": {"rope_parameters": {}, "rope_scaling": {**LINEAR, "rope_theta": 2e4}},
    "older": {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 2e4},
    "base of local layers": {"rope_parameters": {**LINEAR, "rope_theta": 2e4}, "rope_local_base_freq": 77.0},
}


def doubles(row: Row) -> Iterator[dict[str, Any]]:
    """Yield configs of `row` with a setting under two keys, in both orders."""
    config = row.config_class(**row.config)
    whole: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    pairs: list[dict[str, Any]] = []
    for other, key in config.attribute_map.items():
        value = whole.get(key)
        if isinstance(value, int | float):
            pairs.append({key: value, other: not value if isinstance(value, bool) else value * 2})
        if isinstance(value, list):
            pairs.append({key: value, other: value[::-1]})
    if hasattr(config, "rope_parameters"):
        pairs += ROTARY.values()
    for pair in pairs:
        rest = {
            k: v for k, v in whole.items() if k not in {*pair, "rope_parameters"} or (k in pair and pair[k] is None)
        }
        yield rest | copy.deepcopy(pair)
        yield rest | dict(reversed(copy.deepcopy(pair).items()))


def read(family: str, config: dict[str, Any]) -> Settings | str:
    try:
        return FAMILIES[family].read(config, frozenset(), "config.json")
    except WeftError as e:
        return str(e)


UNDOUBLED = {"bamba", "falcon_h1", "granitemoehybrid", "mistral4", "nemotron_h"}  # transformers or weft refuses all


@pytest.mark.parametrize("family", each(4, sorted(FIRST)))
def test_doubled_keys_take_the_value_that_transformers_takes(family: str) -> None:
    row, compared = FIRST[family], 0
    for config in doubles(row):
        given = {k: v for k, v in copy.deepcopy(config).items() if k != "model_type"}
        with quiet():
            try:
                theirs = transformers.AutoConfig.for_model(row.config_class.model_type, **given)
            except (
                StrictDataclassError,
                AttributeError,
                KeyError,
                TypeError,
                ValueError,
            ):  # which transformers refuses
                continue
        once = json.loads(theirs.to_json_string(use_diff=False))
        ours = read(family, config)
        if not isinstance(ours, str):  # a refusal, which is no silent choice
            assert ours == read(family, once), config
            compared += 1
    assert compared or not row.config_class.attribute_map or family in UNDOUBLED


@pytest.mark.parametrize("name", ["llama-gqa-tied", "gemma2", "gpt2-tied", "bloom", "opt", "t5", "bart"])
@pytest.mark.parametrize("same", [True, False])
def test_stored_head_overrides_a_tied_config(name: str, same: bool, tmp_path: Path) -> None:
    """A checkpoint with a head of its own keeps it whatever the config says; a copy of the embedding is one matrix."""
    from safetensors.numpy import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    KNOWN[name].save(tmp_path / "shards")
    whole: dict[str, np.ndarray] = {}
    for file in (tmp_path / "shards").glob("*.safetensors"):
        whole |= load_file(file)
    embedding = next(
        v
        for k, v in whole.items()
        if k.endswith(("embed_tokens.weight", "wte.weight", "shared.weight", "word_embeddings.weight"))
    )
    head = embedding if same else np.random.default_rng(7).standard_normal(embedding.shape).astype(np.float32) * 0.2
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({**whole, "lm_head.weight": head.copy()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "shards" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    ids = np.random.default_rng(1).integers(3, 90, (1, 9))
    seq2seq = config.get("is_encoder_decoder", False)
    kind = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    with quiet():
        model = kind.from_pretrained(folder).eval().double()
    graph = load_source(folder).graph
    if seq2seq:
        import torch

        from weft.ir import interpret

        with torch.no_grad():
            want = model(input_ids=torch.from_numpy(ids), decoder_input_ids=torch.from_numpy(ids)).logits[0].numpy()
        feeds = {name: np.ones_like(ids) if "mask" in name else ids for name in graph.inputs}
        feeds |= {name: np.arange(9)[None] for name in graph.inputs if "position" in name}
        got = np.asarray(interpret(graph, feeds)["logits"][0])
    else:
        want, got = reference(model, ids)[0], computed(graph, ids)
    assert error(got, want) < 1e-6


def test_tied_matrix_may_be_stored_as_the_head(tmp_path: Path) -> None:
    """transformers ties the embedding to the head if only the head is in the file."""
    from safetensors.numpy import load_file, save_file

    model = ROWS["llama-gqa-tied"].save(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.embed_tokens.weight" in tensors:
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
            save_file(tensors, file, metadata={"format": "pt"})
            index = tmp_path / "model.safetensors.index.json"
            index.write_text(index.read_text().replace("model.embed_tokens.weight", "lm_head.weight"))
    ids = np.random.default_rng(1).integers(3, 90, (1, 9))
    assert error(computed(load_source(tmp_path).graph, ids), reference(model, ids)[0]) < 1e-4
