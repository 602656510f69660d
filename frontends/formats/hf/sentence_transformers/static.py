"""StaticEmbedding of sentence-transformers and model2vec: an embedding table instead of a transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes import Recipe, Scale

from ....dsl import Unchanged
from ....models.tables.family import Family, Fetch, key
from ....models.tables.settings import Settings
from ..safetensors import SafetensorsReader

STATIC_EMBEDDING = "StaticEmbedding"  # class of the module


def _read_rows(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """Return the recipe of the embedding table, times the weights of its rows if the folder has them (model2vec)."""
    if fetch.has("embedding.weight"):
        return fetch("embedding.weight")
    return Scale(fetch("embeddings"), fetch("weights")) if fetch.has("weights") else fetch("embeddings")


STATIC = Family(  # an embedding table, expressed as a transformer whose layer has no effect
    model_types=("static",),
    settings={
        **{"kind": "encoder", "vocab": key("vocab_size"), "dim": key("hidden_size")},
        **{"layers": 1, "block": lambda config: Unchanged(), "arrangement": "post"},
    },
    names={"embed": _read_rows},
)


def build_table_config(folder: Path) -> dict[str, Any]:
    """Return a config of model_type "static" with the sizes of the embedding table in `folder`.

    Raises:
        WeftError: if several tokens share a table row, or there is no table.
    """
    reader = SafetensorsReader(folder)
    keys = {*reader.keys()}
    if "mapping" in keys:
        remedy = "save the folder with sentence-transformers, which writes a row per token"
        raise WeftError(f"{reader.path}: tokens that share rows (tensor 'mapping') are not supported: {remedy}")
    name = next((key for key in ("embedding.weight", "embeddings") if key in keys), None)
    if name is None or len(shape := reader.shape(name)) != 2:
        raise WeftError(f"{reader.path} lacks the matrix 'embedding.weight', which a StaticEmbedding needs")
    return {"model_type": "static", "vocab_size": shape[0], "hidden_size": shape[1]}
