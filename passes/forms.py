"""Forms of a graph: what pipelines make of it for a target, which is built from several of them.

A decoder of PyTorch is a model and its decode step, an encoder-decoder for ONNX Runtime two models: each a form, made
by passes of the graph itself or of another form. Forms have names; that of the graph itself is "".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.ir import Graph

from .core.pipeline import Phase, Pipeline
from .edits.legalization import is_fused
from .library.cleanup.cse import Cse
from .library.cleanup.dce import Dce
from .library.cleanup.fold_constants import FoldConstants
from .library.fuse.unfuse import Unfuse
from .library.fuse.unpack import Unpack
from .library.target.outputs import DropOutputs
from .library.target.sides import DECODER, ENCODER, EncoderSide, package
from .report import Report
from .runner import run_passes


@dataclass(frozen=True)
class Form:
    """The recipe of a form: run `pipeline` on the form called `of`, where "" is the graph that is compiled."""

    pipeline: Pipeline
    of: str = ""


def make_forms(
    graph: Graph,
    forms: Mapping[str, Form],
    *,
    verify: bool = False,
    dump: str | Path | None = None,
    report: Report | None = None,
) -> dict[str, Graph]:
    """Return `graph` and the `forms` of it, by name; each may be made of one before it.

    `verify`, `dump` and `report` are those of `run_passes`; every form gets a folder of its name within `dump`.

    Raises:
        WeftError: as `run_passes` does; or if what an encoder makes has another type than its decoder reads.
    """
    made = {"": graph}
    for name, form in forms.items():
        folder = None if dump is None else Path(dump) / name
        made[name] = run_passes(made[form.of], form.pipeline, verify=verify, dump=folder, report=report)
    for side in (p for form in forms.values() for p in form.pipeline.passes if isinstance(p, EncoderSide)):
        package(made[ENCODER], made[DECODER], side.at).connections()
    return made


def canonical(graph: Graph, without: tuple[str, ...] = ()) -> Graph:
    """Return a copy of `graph` with nothing fused, packed, repeated or unused, and `without` some outputs."""
    dropping = (DropOutputs(without),) if without else ()
    folding = (FoldConstants(),) if any(map(is_fused, graph.nodes)) else ()  # packed weights are constants
    return run_passes(graph, Pipeline((Phase("", (*dropping, Unfuse(all=True), *folding, Unpack(), Cse(), Dce())),)))
