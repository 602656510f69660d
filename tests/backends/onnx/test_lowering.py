"""Selection of lowerings: the first that accepts, absorbed producers, and refusals with reasons."""

from __future__ import annotations

import pytest

from weft.backends.onnx.lowering import LOWERINGS, list_refusals, select_lowerings
from weft.backends.target import TARGETS
from weft.ir import OPS, Graph, TensorType, WeftError, ops
from weft.ir.recipes import Full
from weft.ir.types import dtypes
from weft.passes import run_passes

from .small_decoder import decoder


def test_every_lowering_names_an_op_and_known_targets() -> None:
    for name, found in LOWERINGS.items():
        assert name in OPS
        assert all(any(low.targets(target) for target in TARGETS.values() if target.opset) for low in found)


def test_rope_with_another_head_count_is_not_absorbed() -> None:
    """A rotation of half as many, twice as wide heads is another function than the kernel's."""
    graph = run_passes(decoder().graph(), "default")
    (rope,) = [n for n in graph.nodes if n.op is ops.rope and n.output.name == "layers.1.attn.q_rope"]
    wide = graph.add_param("wide", TensorType(dtypes.f32, (8,)), Full(0.1, (8,)))
    for node in [n for n in graph.nodes if n.op is ops.rope and n.scope == rope.scope]:
        node.set_input(2, wide)
    rope.attrs["heads"] = 2
    chosen = select_lowerings(graph, TARGETS["ort-cpu"]).chosen
    assert [n.scope for n in chosen if n.op is ops.rope] == ["layers.1.attn"] * 2


def test_op_without_lowering_is_reported_with_each_refusal() -> None:
    graph = Graph("odd")
    x = graph.add_input("x", TensorType(dtypes.f32, (2, 3)))
    graph.add_output("y", ops.add(x, x))
    (node,) = graph.nodes
    place = TARGETS["ort-cpu"]
    saved = LOWERINGS["add"]
    LOWERINGS.remove("add")
    try:
        assert list_refusals(node, place) == ["no lowering is registered"]
        with pytest.raises(WeftError, match="ort-cpu cannot run add in the model: no lowering is registered"):
            select_lowerings(graph, place)
    finally:
        LOWERINGS.add("add", saved)


def test_every_pass_of_the_default_pipeline_fires_on_a_plain_decoder() -> None:
    from weft.passes import Report

    report = Report()
    run_passes(decoder(tie=False).graph(), "default", report=report, verify=True)
    fired = {r.applied.name: r.rewrites for r in report.records}
    for name in ("pack-qkv", "pack-gate-up", "fuse-residual-norm", "kv-cache", "last-token-logits"):
        assert fired[name] > 0, fired
