"""Folders of target torch: facts of the manifest, notes for the user, and graphs that are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from weft import MLP, Attention, Block, Decoder, RMSNorm, RoPE
from weft.backends.target import TARGETS
from weft.backends.torch.torch_folder import BF16_NOTE, TorchFolder
from weft.ir import Graph, WeftError
from weft.passes import run_passes

from ...lowered import forms


def graph_of(**options: Any) -> Graph:
    return Decoder(23, 32, 2, Block(Attention(2, rope=RoPE(), **options), MLP(48), RMSNorm())).graph()


def folder_of(graph: Graph, dtype: str = "f32", **options: Any) -> tuple[TorchFolder, list[str]]:
    notes: list[str] = []
    chosen = TARGETS["torch"].options(**options)
    return TorchFolder(forms(graph, "torch", chosen), dtype, chosen, notes), notes


def test_folder_has_outputs_caches_code_and_weights(tmp_path: Path) -> None:
    built, notes = folder_of(graph_of())
    assert built.facts["outputs"] == ["logits"] and notes == [] and built.idle == {}
    shapes = [p.type.concrete({}) for p in graph_of().params.values() if not p.recipe.is_constant]
    weights = sum(map(math.prod, shapes))
    assert built.weight_bytes == 4 * weights
    written: list[int] = []
    built.write(tmp_path, written.append)
    assert {"model.py", "load.py", "sampling.py", "generate.py", "model.safetensors"} <= {
        p.name for p in tmp_path.iterdir()
    }
    assert sum(written) == built.weight_bytes


def test_window_caches_roll() -> None:
    for options, window in (({"window": 5}, True), ({}, False)):
        facts = folder_of(graph_of(**options))[0].facts
        assert ("'growth': 'window'" in str(facts)) is window


def test_graph_with_caches_is_refused() -> None:
    with pytest.raises(WeftError, match="target torch adds caches by itself: leave out the pass kv-cache"):
        folder_of(run_passes(graph_of(), "kv-cache"))


def test_quantized_weights_are_counted_and_fastest_in_bf16() -> None:
    graph = run_passes(graph_of(), "quantize{bits=4, group=32, method=rtn}")
    built, notes = folder_of(graph)
    assert sum(built.facts["blocks"].values()) > 0 and notes == [BF16_NOTE]
    assert folder_of(graph, "bf16")[1] == []
