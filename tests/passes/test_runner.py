"""Running pipelines: copies, hooks, reports, dumps, and checks that name the pass that broke."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import weft
from weft.ir import Graph, MemoryReader, TensorType, WeftError, ops, parse
from weft.ir.recipes import Concat, Source
from weft.ir.types import dtypes, sizes
from weft.passes import Pass, Report, Trace, all_passes, lookup, run_passes
from weft.passes.core import base
from weft.passes.core.equivalence import EquivalenceCheck
from weft.passes.runner import PassRun

from .models import BATCH, SEQ, Tiny, count, weight


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


def test_the_graph_of_the_caller_is_not_touched() -> None:
    before = Tiny().graph()
    text = str(before)
    after = weft.run_passes(before, "default, cast{dtype=f16}")
    assert str(before) == text and after != before
    assert count(after, "attention") == 2 and "past_key_values.1.key" in after.inputs
    assert after == weft.run_passes(before, "default, cast{dtype=f16}")  # deterministic
    assert after.meta == before.meta


@pytest.mark.parametrize(
    "tiny", [Tiny(), Tiny(norm="layer", rope=False, alibi=True, bias="q up"), Tiny(tied=True, window=2)]
)
def test_the_default_pipeline_verifies(tiny: Tiny) -> None:
    after = run_passes(tiny.graph(), "default, cast{dtype=bf16}", verify=True)
    assert parse(str(after)) == after


def test_the_default_pipeline_of_an_encoder() -> None:
    g = Tiny(rope=False).graph()
    g.meta["kind"] = "encoder"
    mask = g.add_input("attention_mask", TensorType(dtypes.i64, (BATCH, SEQ)))
    for node in list(g.nodes):
        if node.op is ops.attention:
            with g.inserting(before=node):
                y = ops.attention(*node.inputs[:3], None, mask, **{**node.attrs, "causal": False})
            g.replace(node, y)
    after = run_passes(g, verify=True)
    assert list(after.inputs) == ["input_ids", "attention_mask"]
    assert count(after, "linear") == 9 and count(after, "add_norm") == 4


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
    assert report.seconds > 0
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
        (rename, "pass sabotage breaks its declared effect .*: the outputs were logits and are scores"),
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


def test_trial_inputs_fit_the_graph() -> None:
    g = Graph("g")
    ids = g.add_input("ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    mask = g.add_input("attention_mask", TensorType(dtypes.i64, (BATCH, SEQ)))
    flags = g.add_input("flags", TensorType(dtypes.bool_, (sizes.sym("other"),)))
    g.add_input("x", TensorType(dtypes.f32, (BATCH, 2 * SEQ)))
    g.add_output("y", ops.embedding(ids, weight(g, "small", 3, 2)))
    g.add_output("z", ops.embedding(ids, weight(g, "large", 9, 2)))
    fed = EquivalenceCheck(3).make_inputs(g, batch=50, seq=7)
    assert fed["ids"].shape == (50, 7) and set(fed["ids"].flat) == {0, 1, 2}
    lengths = fed["attention_mask"].sum(1)
    assert (fed["attention_mask"] == (np.arange(7) < lengths[:, None])).all() and set(lengths) == set(range(1, 8))
    assert fed["flags"].dtype == bool and fed["flags"].shape == (4,) and fed["x"].shape == (50, 14)
    assert mask.name in fed and flags.name in fed
    assert all(
        (EquivalenceCheck(3).make_inputs(g, batch=50, seq=7)[name] == array).all() for name, array in fed.items()
    )


@pytest.mark.parametrize("cls", all_passes().values(), ids=list(all_passes()))
def test_every_pass_is_documented_and_checked(cls: type[Pass]) -> None:
    assert cls.__doc__ and len(cls.doc()) > 40
    assert cls.effect in ("exact", "conditional", "lossy", "changing")
    assert (cls.check is Pass.check) == (cls.effect == "exact")
    assert cls.run is not Pass.run and lookup(cls.name) is cls
    assert inspect.signature(cls).parameters.keys() == {a.name for a in cls.arguments()}
    for argument in cls.arguments():
        assert argument.type_text and (argument.required or argument.check(argument.default) == argument.default)


def test_registering_a_name_twice_is_a_bug() -> None:
    sabotage(nudge)
    with pytest.raises(ValueError, match="pass sabotage is declared twice"):

        @dataclass(frozen=True)
        class Other(Pass):
            name = "sabotage"
            effect = "exact"


@pytest.mark.parametrize("positions", [1, 3, 8])
def test_trials_stay_within_a_table_of_positions(positions: int) -> None:
    block = weft.Block(weft.Attention(2), weft.GatedMLP(16))
    graph = weft.Decoder(50, 16, 1, block, positions=weft.LearnedPositions(positions)).graph()
    run_passes(graph, verify=True)
