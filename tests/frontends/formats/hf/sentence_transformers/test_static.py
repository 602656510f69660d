"""StaticEmbedding and model2vec: an embedding table as a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from weft.frontends.formats.hf.sentence_transformers.static import STATIC, build_table_config
from weft.frontends.models.families import build
from weft.ir import MemoryReader, WeftError

TABLE = np.arange(6, dtype=np.float32).reshape(3, 2)
CONFIG = {"model_type": "static", "vocab_size": 3, "hidden_size": 2}


@pytest.mark.parametrize("name", ["embedding.weight", "embeddings"])
def test_config_has_the_sizes_of_the_table(name: str, tmp_path: Path) -> None:
    save_file({name: TABLE}, tmp_path / "model.safetensors")
    assert build_table_config(tmp_path) == CONFIG


def test_tokens_that_share_rows_and_missing_tables_are_refused(tmp_path: Path) -> None:
    save_file({"embeddings": TABLE, "mapping": np.zeros(3, np.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(WeftError, match="tokens that share rows"):
        build_table_config(tmp_path)
    save_file({"embeddings": TABLE[0]}, tmp_path / "model.safetensors")
    with pytest.raises(WeftError, match=r"lacks the matrix 'embedding.weight'"):
        build_table_config(tmp_path)


def test_rows_are_scaled_by_their_weights_if_stored() -> None:
    stored = {"embeddings": TABLE, "weights": np.float32([1, 2, 3])}
    for keys, wanted in ((["embeddings"], TABLE), (list(stored), TABLE * [[1], [2], [3]])):
        recipe = STATIC.recipe("embed.weight", STATIC.read(CONFIG, frozenset(keys), "c"), frozenset(keys))
        assert recipe is not None
        np.testing.assert_array_equal(recipe.evaluate(MemoryReader(stored)), wanted)


def test_the_model_is_its_table_alone() -> None:
    graph = build(STATIC.read(CONFIG, frozenset(), "c")).graph()
    assert [param for param in graph.params if not graph.params[param].recipe.is_constant] == ["embed.weight"]
