"""Files by which sentence-transformers knows how an encoder makes one vector of a text."""

from __future__ import annotations

from typing import Any

from weft.ir.graph import Graph

_MODES = {
    **{"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"},
    **{"last": "lasttoken", "weighted": "weightedmean_tokens"},
}
_MODULES = "sentence_transformers.models."  # names of all versions


def embedding_files(graph: Graph, width: int) -> dict[str, Any]:
    """Return what goes into JSON files, by their paths; nothing for a model whose metadata names no pooling."""
    mode = _MODES.get(graph.meta.get("pooling") or "")
    if mode is None or graph.meta.get("kind") != "encoder":
        return {}
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    if not graph.meta.get("normalize"):
        del paths["Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{_MODULES}{kind}"}
        for i, (kind, path) in enumerate(paths.items())
    ]
    pooling = {f"pooling_mode_{name}": name == mode for name in _MODES.values()}
    return {"modules.json": modules, "1_Pooling/config.json": {"word_embedding_dimension": width, **pooling}}
