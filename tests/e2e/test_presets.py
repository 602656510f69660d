"""Presets as ONNX graphs, their weights never written: what compiling does with models of any size."""

from __future__ import annotations

import pytest

from weft.backends.onnx import export
from weft.backends.onnx.lowering import list_refusals
from weft.backends.target import TARGETS
from weft.frontends import PRESETS, load_source
from weft.ir import Graph
from weft.ir.types import dtypes, sizes
from weft.passes import Trace, legalize, run_passes

from ..sampling import by_turns, each

PARTICULAR = ("switch-base-8", "gpt3-175b", "mixtral-8x7b", "deepseek-v3", "mamba-130m")


def compiled(name: str, target: str = "ort-cpu", dtype: str = "f32", length: int | None = None) -> Graph:
    """The graph that the preset is compiled to."""
    graph = load_source(name).graph
    return run_passes(graph, TARGETS[target].pipeline(graph, dtype, max_length=length))


def cache_numbers(graph: Graph, length: int) -> int:
    """Count the numbers in the caches of one text."""
    pasts = [v for n, v in graph.inputs.items() if n.startswith("past_key_values.")]
    return sum(sizes.evaluate(v.type.elements, {"batch": 1, "capacity": length}) for v in pasts)


@pytest.mark.halved
@pytest.mark.parametrize(
    ("name", "target"),
    [*((name, "ort-cpu") for name in each(2, PRESETS)), *by_turns(PARTICULAR, ("onnx", "ort-cuda"))],
)
def test_every_preset_builds_as_onnx(name: str, target: str) -> None:
    place = TARGETS[target]
    dtype = place.dtypes[0]
    graph = compiled(name, target, dtype)
    sides = ("encoder-side", "decoder-side") if graph.meta["kind"] == "encoder-decoder" else ("",)
    parts = [run_passes(graph, side) for side in sides]
    for part in parts:
        legalize(part, lambda node: list_refusals(node, place), Trace())
    written = export.count_weight_bytes(export.build_model(part, place, 512) for part in parts)
    expected = PRESETS[name].parameters * dtypes.parse(dtype).bits / 8
    assert abs(written / expected - 1) < 0.01  # norms are folded away, equal initial values merged, tables added


def test_mistral_keeps_an_eighth_of_32k_tokens() -> None:
    """32 layers of 8 heads of 128, keys and values: 4 GiB in 2 bytes, or 512 MiB for the window."""
    rolling = compiled("mistral-7b", length=32_768)
    assert cache_numbers(rolling, 32_768) == 2 * 32 * 8 * 128 * 4096
    graph = load_source("mistral-7b").graph
    assert cache_numbers(run_passes(graph, "kv-cache"), 32_768) == 8 * cache_numbers(rolling, 32_768)


def test_deepseek_caches_only_its_latent() -> None:
    """512 numbers and a rotary key of 64 per layer and token, in 2 bytes each."""
    graph = compiled("deepseek-v3", dtype="bf16", target="ort-cuda")
    pasts = [v for n, v in graph.inputs.items() if n.startswith("past_key_values.")]
    assert len(pasts) == 61
    assert sum(sizes.evaluate(v.type.bytes, {"batch": 1, "capacity": 1}) for v in pasts) == 576 * 2 * 61


def test_gpt3_rolls_only_its_banded_layers() -> None:
    graph = compiled("gpt3-175b", length=2048)
    assert cache_numbers(graph, 2048) == 48 * 2 * 12_288 * (2048 + 256)


def test_mamba_keeps_a_constant_state() -> None:
    graph = compiled("mamba-130m")
    assert cache_numbers(graph, 4096) == 0
    states = [v for n, v in graph.inputs.items() if n.startswith("past_states.")]
    assert sum(sizes.evaluate(v.type.elements, {"batch": 1}) for v in states) == 24 * 1536 * (16 + 3)
