"""Running pipelines: copies, hooks, reports, dumps, and checks that name the pass that broke."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import weft
from weft.ir import Graph, MemoryReader, TensorType, WeftError, ops, parse
from weft.ir.recipes import Concat, Source
from weft.ir.types import dtypes
from weft.passes import Pass, Report, Trace, run_passes
from weft.passes.core import base
from weft.passes.runner import PassRun

from .models import BATCH, Tiny, count, weight


def sabotage(edit: Callable[[Graph], None]) -> type[Pass]:
    @dataclass(frozen=True)
    class Sabotage(Pass):
        name = "sabotage"
        effect = "exact"

        def run(self, graph: Graph, trace: Trace) -> None:
            edit(graph)

    return Sabotage


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    yield
    base.PASSES.remove("sabotage")


def test_input_graph_is_not_modified() -> None:
    before = Tiny().graph()
    text = str(before)
    after = weft.run_passes(before, "default, cast{dtype=f16}")
    assert str(before) == text and after != before
    assert count(after, "attention") == 2 and "past_key_values.1.key" in after.inputs
    assert after == weft.run_passes(before, "default, cast{dtype=f16}")  # deterministic
    assert after.meta == before.meta


def test_report_and_hooks(tmp_path: Path) -> None:
    report, steps = Report(), list[PassRun]()
    after = run_passes(
        Tiny().graph(), "simplify: dce; fuse: pack-qkv, fuse-residual-norm", report=report, hooks=[steps.append]
    )
    assert [(r.phase, r.applied.name, r.rewrites) for r in report.records] == [
        ("simplify", "dce", 0),
        ("fuse", "pack-qkv", 2),
        ("fuse", "fuse-residual-norm", 4),
    ]
    assert report.records[1].nodes == (33, 31) and report.records[2].nodes == (31, len(after))
    assert all(record.seconds > 0 for record in report.records)
    assert "pack-qkv: 2 rewrites, 33 -> 31 nodes" in str(report)
    assert "  pack-qkv: rewrote %layers.0.attn.q (× 2)" in str(report)
    assert [s.index for s in steps] == [1, 2, 3] and steps[-1].after is after


def test_dump_writes_the_text_between_passes(tmp_path: Path) -> None:
    before = Tiny().graph()
    after = run_passes(before, "dce, pack-qkv, cast{dtype=f16}", dump=tmp_path / "deep" / "dump")
    files = sorted(p.name for p in (tmp_path / "deep" / "dump").iterdir())
    assert files == ["00-input.weft", "01-dce.weft", "02-pack-qkv.weft", "03-cast.weft"]
    assert parse((tmp_path / "deep/dump/00-input.weft").read_text()) == before
    assert parse((tmp_path / "deep/dump/03-cast.weft").read_text()) == after


def test_a_fusion_that_never_fires_is_in_the_report() -> None:
    g = Graph("g")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, 8)))
    halved = ops.affine(ops.add(x, ops.exp(x)), by=0.5, name="halved")
    g.add_output("y", ops.rms_norm(halved))
    report = Report()
    run_passes(g, "fuse-residual-norm", report=report)
    assert "nearest miss at rms_norm (%rms_norm): operand x, %halved, is made by affine, not by add" in str(report)


def swap_weights(graph: Graph) -> None:
    node = next(n for n in graph.nodes if n.output.name == "layers.0.attn.k")
    node.set_input(1, graph.params["layers.0.attn.v.weight"])


def retype(graph: Graph) -> None:
    node = next(n for n in graph.nodes if n.op is ops.rms_norm)
    node.output.type = node.output.type.with_dtype(dtypes.f16)


def rename(graph: Graph) -> None:
    graph.outputs["scores"] = graph.outputs.pop("logits")


def nudge(graph: Graph) -> None:
    next(n for n in graph.nodes if n.op is ops.rms_norm).attrs["eps"] += 1e-9


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (swap_weights, r"pass sabotage breaks its declared effect \(exact\): output logits differs by .* 1e-12 is"),
        (nudge, r"pass sabotage breaks its declared effect \(exact\): output logits differs by .*e-\d+"),
        (retype, "pass sabotage left a broken graph: graph tiny: .*rms_norm"),
        (rename, "pass sabotage breaks its declared effect .*: the outputs must be logits, but are scores"),
    ],
)
def test_verification_names_the_pass_that_broke(edit: Callable[[Graph], None], message: str) -> None:
    sabotage(edit)
    with pytest.raises(WeftError, match=message):
        run_passes(Tiny().graph(), "dce, cse, sabotage, pack-gate-up", verify=True)


def test_verification_needs_no_weights() -> None:
    """Random numbers stand in for a checkpoint, also for one that is not there or that must not be read."""

    class Unreadable(MemoryReader):
        def read(self, key: str, start: int, stop: int) -> np.ndarray:
            raise AssertionError(f"{key} was read")

    def graph(reader: MemoryReader) -> Graph:
        g = Graph("g", reader)
        x = g.add_input("x", TensorType(dtypes.f32, (BATCH, 8)))
        w = weight(g, "w", 6, 8, recipe=Source("w"))
        g.add_output("y", ops.linear(x, w))
        g.add_output("z", ops.matmul(x, ops.transpose(w, axes=(1, 0))))
        return g

    for reader in (Unreadable({"w": np.zeros((6, 8), np.float32)}), MemoryReader({})):
        assert count(run_passes(graph(reader), "fold-constants", verify=True), "transpose") == 0
    lost = graph(MemoryReader({}))
    lost.params["w"].recipe = Concat((Source("a"), Source("b")))
    with pytest.raises(WeftError, match="the shape of tensor 'a' is unknown without a checkpoint"):
        run_passes(lost, "dce", verify=True)


def test_registering_a_name_twice_raises() -> None:
    sabotage(nudge)
    with pytest.raises(ValueError, match="pass sabotage is declared twice"):

        @dataclass(frozen=True)
        class Other(Pass):
            name = "sabotage"
            effect = "exact"


@pytest.mark.parametrize("positions", [1, 3, 8])
def test_verification_stays_within_a_table_of_positions(positions: int) -> None:
    block = weft.Block(weft.Attention(2), weft.GatedMLP(16))
    graph = weft.Decoder(50, 16, 1, block, positions=weft.LearnedPositions(positions)).graph()
    run_passes(graph, verify=True)
