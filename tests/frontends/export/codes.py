"""Models with quantized weights, their exports and their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from weft.frontends import load_source
from weft.frontends.app.api.export import export
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.model import Model
from weft.ir import Graph, interpret
from weft.ir.recipes.blocks import BlockRecipe

Array = np.ndarray[Any, Any]


IDS = np.random.default_rng(2).integers(0, 97, (1, 24))


FEEDS = {"input_ids": IDS, "position_ids": np.arange(24)[None]}


GQA = {"num_key_value_heads": 2, "intermediate_size": 96}


RTN = "quantize{method=rtn, bits=%d, group=%d, zeros=%s}"


def compute_logits(graph: Graph) -> Array:
    return interpret(graph, {name: FEEDS[name] for name in graph.inputs})["logits"]


def quantize(folder: Path, bits: int = 4, group: int = 32, zeros: bool = True, before: str = "") -> Model:
    return rewrite(load_source(folder), before + RTN % (bits, group, str(zeros).lower()))


def export_with_notes(model: Any, out: Path, **options: Any) -> list[str]:
    """Export, and return the notes."""
    notes: list[str] = []
    export(model, out, note=notes.append, **options)
    return notes


def read_blocks(graph: Graph, name: str) -> Any:
    """The blocks of a parameter that a pass quantized."""
    recipe = graph.params[name].recipe
    assert isinstance(recipe, BlockRecipe)
    return recipe.read_blocks(graph.reader, 0, recipe.shape(graph.reader)[0])


def unpack_module(tensors: dict[str, Array], name: str, bits: int) -> tuple[Array, Array, Array | None]:
    """Codes and zero points from 0 on, and scales, of a module in compressed-tensors: code i of a row begins at bit
    i · bits of the row's words, a zero point so along the outputs."""
    rows, width = tensors[f"{name}.weight_shape"].tolist()

    def codes(words: Array, count: int) -> Array:
        numbers = [int.from_bytes(row.astype("<i4").tobytes(), "little") for row in words]
        return np.array([[n >> (bits * i) & ((1 << bits) - 1) for i in range(count)] for n in numbers])

    zeros = tensors.get(f"{name}.weight_zero_point")
    packed, scales = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]
    assert packed.shape == (rows, -(-width * bits // 32)) and packed.dtype == np.int32
    return codes(packed, width), scales, None if zeros is None else codes(np.ascontiguousarray(zeros.T), rows).T
