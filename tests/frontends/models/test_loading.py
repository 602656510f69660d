"""Models from a table, a config and a checkpoint in memory: what is read, tied, left out and refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.models.families import FAMILIES, build_from_table, load
from weft.ir import MemoryReader, WeftError

CONFIG: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 5, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "max_position_embeddings": 8},
}
LLAMA = FAMILIES["llama"]


def checkpoint(**changes: Any) -> dict[str, np.ndarray]:
    """Return random tensors for all parameters of `CONFIG`, with these changes; None removes a tensor."""
    rng, tensors = np.random.default_rng(0), dict[str, np.ndarray]()
    for param in build_from_table(LLAMA, CONFIG, frozenset(), "config.json").graph.params.values():
        for key in param.recipe.sources():
            tensors[key] = rng.standard_normal(param.shape).astype(np.float32)
    tensors |= changes
    return {key: array for key, array in tensors.items() if array is not None}


def loaded(config: dict[str, Any] = CONFIG, **changes: Any) -> Any:
    return load(LLAMA, config, MemoryReader(checkpoint(**changes), "folder"), "config.json")


def test_every_tensor_is_read_or_reported() -> None:
    model = loaded(**{"magic.weight": np.ones(1), "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(1)})
    assert model.unread == ["magic.weight"]
    assert model.ignored == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert [(part.kind, part.name) for part in model.left_out] == [("tensors", "magic")]
    found = model.graph.params["layers.0.attn.q.weight"].recipe.evaluate(model.graph.reader)
    np.testing.assert_array_equal(found, checkpoint()["model.layers.0.self_attn.q_proj.weight"])


def test_unread_keys_of_the_config_are_left_out() -> None:
    assert [part.name for part in loaded({**CONFIG, "magic": 3}).left_out] == ["magic"]


def test_a_tied_head_that_differs_from_the_embedding_is_separate() -> None:
    tied = {**CONFIG, "tie_word_embeddings": True}
    assert not loaded(tied).settings.tie
    same = checkpoint()["model.embed_tokens.weight"]
    assert loaded(tied, **{"lm_head.weight": same}).settings.tie


def test_a_missing_embedding_is_read_from_its_tied_head() -> None:
    model = loaded({**CONFIG, "tie_word_embeddings": True}, **{"model.embed_tokens.weight": None})
    assert list(model.graph.params["embed.weight"].recipe.sources()) == ["lm_head.weight"]


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            {},
            {"model.norm.weight": None},
            "^folder has no tensor 'model.norm.weight', which parameter final_norm.weight",
        ),
        (
            {},
            {"model.norm.weight": np.ones(3, np.float32)},
            r"model.norm.weight \[3\] does not fit final_norm.weight \[4\]",
        ),
        ({}, {"model.norm.weight": np.ones(4, np.int8)}, "has dtype i8, but weights must be floats"),
        ({"num_hidden_layers": 99}, {}, "^config.json: num_hidden_layers=99 is too large: its checkpoint has only"),
        ({"num_key_value_heads": 3}, {}, "^config.json: num_attention_heads=2: num_key_value_heads=3: "),
    ],
)
def test_refusals(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        loaded({**CONFIG, **config}, **changes)


def test_parameters_without_a_name_are_refused() -> None:
    with pytest.raises(
        WeftError, match=r"parameter final_norm.weight has no checkpoint name in the table of llama models"
    ):
        build_from_table(LLAMA.derive("llama", names={"final_norm": None}), CONFIG, frozenset(), "config.json")
