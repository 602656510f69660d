"""Targets: dtypes and options that they accept, their pipelines, and what they do not do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.backends.folder_facts import FolderFacts
from weft.backends.target import TARGETS, Backend, Place, collect_options, join_targets
from weft.ir import Graph, WeftError

CPU, TORCH = TARGETS["ort-cpu"], TARGETS["torch"]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Decoder(17, 8, 1, Block(Attention(2, rope=RoPE()), GatedMLP(12), RMSNorm()), context=16).graph()


def pass_names(backend: Backend, graph: Graph, dtype: str, **settings: Any) -> list[str]:
    return [p.name for p in backend.pipeline(graph, dtype, **settings).passes]


def test_first_dtype_is_the_default() -> None:
    assert CPU.dtype(None) == "f32" and TARGETS["ort-cuda"].dtype(None) == "f16"
    assert CPU.dtype("float16") == "f16"
    with pytest.raises(WeftError, match="target ort-cpu does not support bf16; it supports f32, f16"):
        CPU.dtype("bf16")


def test_options_are_chosen_by_name() -> None:
    options: Any = CPU.choose({"prepack": True, "keep_blocks": "all", "activations": ""})
    assert options.prepack and options.keep_blocks == "all" and not hasattr(options, "activations")
    assert CPU.choose({}) == CPU.options()


@pytest.mark.parametrize(
    ("target", "given", "words"),
    [
        ("ort-cpu", {"colour": 1}, "target ort-cpu has no option 'colour'; it takes .*prepack"),
        (
            "ort-cpu",
            {"activations": "fp8"},
            "--activations is an option of target torch only, not of ort-cpu; leave it out",
        ),
        ("torch", {"tensor_parallel": 2}, "has no option 'tensor_parallel' any more: target transformers writes plans"),
        ("torch", {"cache_dtype": "int3"}, "--cache-dtype 'int3' is unknown: choose int8 or int4 or fp8"),
    ],
)
def test_options_of_others_are_refused(target: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(WeftError, match=words):
        TARGETS[target].choose(given)


def test_pipeline_is_the_default_one_in_the_phases_of_the_target(graph: Graph) -> None:
    cpu, torch = (pass_names(backend, graph, "f32") for backend in (CPU, TORCH))
    assert "kv-cache" in cpu and "kv-cache" not in torch  # modules have caches of their own
    assert "pack-gate-up" not in cpu and "pack-gate-up" in pass_names(TARGETS["onnx"], graph, "f32")


def test_cast_is_the_last_pass_unless_in_f32(graph: Graph) -> None:
    assert pass_names(CPU, graph, "f16", passes="") == ["cast"]
    assert pass_names(CPU, graph, "f32", passes="") == []


def test_forms_without_lowerings_are_refused(graph: Graph) -> None:
    accepts, lowered = CPU.takes(graph, ""), {node.op.name: CPU.refusals(node) for node in graph.nodes}
    assert {node.op.name: accepts(node) for node in graph.nodes} == lowered and lowered["linear"] is None
    with pytest.raises(WeftError, match="target ort-cpu has only one form of a graph, not 'step'"):
        CPU.takes(graph, "step")


def test_place_is_named_by_runtime_and_device() -> None:
    assert str(Place("ort-cpu", "cpu")) == "ONNX Runtime on the CPU"
    assert str(Place("torch", "cuda", "bf16")) == "PyTorch on the GPU"


def test_targets_without_a_runtime_open_nothing() -> None:
    facts = FolderFacts(Path("out"), (), "decoder", "ort-cpu", vocab=9, max_length=8)
    with pytest.raises(WeftError, match="weft cannot run out, compiled for ort-cpu"):
        Backend.open(CPU, facts, "cpu", None)
    with pytest.raises(WeftError, match=r"keeps all experts on the device: .*compile it with --target torch"):
        CPU.open_offloaded(facts, "cpu", None, 2)
    with pytest.raises(WeftError, match="weft cannot run a folder compiled for ort-cpu"):
        Backend.place(CPU, "cpu")
    assert Backend.files(CPU, "decoder") == ()


def test_description_is_plain_data() -> None:
    described = replace(CPU, doc="words").describe()
    assert described["name"] == "ort-cpu" and described["doc"] == "words" and described["dtypes"] == ("f32", "f16")
    assert described["options"]["prepack"]["type"] == "bool" and described["options"]["prepack"]["default"] is False


def test_options_are_collected_with_their_widest_definition() -> None:
    option, targets = collect_options()["cache_dtype"]
    assert option.choices == ("int8", "int4", "fp8") and targets == ["ort-cpu", "ort-cuda", "onnx", "torch"]


def test_targets_are_joined_as_a_phrase() -> None:
    assert join_targets(["torch"]) == "target torch"
    assert join_targets(["a", "b", "c"]) == "the targets a, b and c"
