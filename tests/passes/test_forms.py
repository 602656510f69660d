"""Forms of a graph: each derived from the graph or from an earlier form, and one canonical form of all spellings."""

from __future__ import annotations

from pathlib import Path

from weft.passes import Report, parse_pipeline, run_passes
from weft.passes.forms import Form, canonicalize, derive_graphs

from .models import Tiny, count


def test_forms_derive_from_the_graph_or_from_an_earlier_form(tmp_path: Path) -> None:
    graph, report = Tiny(layers=1).graph(), Report()
    text = str(graph)
    forms = {"packed": Form(parse_pipeline("pack-qkv")), "half": Form(parse_pipeline("cast{dtype=f16}"), "packed")}
    graphs = derive_graphs(graph, forms, verify=True, dump=tmp_path, report=report)
    assert list(graphs) == ["", "packed", "half"] and graphs[""] is graph and str(graph) == text
    assert str(graphs["half"]) == str(run_passes(graph, "pack-qkv, cast{dtype=f16}"))
    assert [r.applied.name for r in report.records] == ["pack-qkv", "cast"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["half", "packed"]


def test_canonical_graph_is_that_of_the_unpacked_and_unfused_model() -> None:
    graph = Tiny(layers=1).graph()
    packed = run_passes(graph, "pack-qkv, pack-gate-up, fuse-residual-norm")
    assert count(canonicalize(packed), "linear") == count(graph, "linear")
    names = [[n.op.name for n in canonicalize(g).nodes] for g in (graph, packed)]
    assert sorted(names[0]) == sorted(names[1]) and "add_norm" not in names[1]


def test_canonical_graph_lacks_given_outputs_and_what_only_they_need() -> None:
    graph = Tiny(layers=1).graph()
    graph.add_output("hidden", next(n.output for n in graph.nodes if n.output.name == "final_norm"))
    assert list(canonicalize(graph, without=("logits",)).outputs) == ["hidden"]
    assert count(canonicalize(graph, without=("logits",)), "linear") == count(graph, "linear") - 1
