"""Forms of a graph: the several graphs that a target needs, each derived from the original graph by a pipeline.

A PyTorch decoder consists of a model and its decode step, an encoder-decoder for ONNX Runtime of two models. Each of
these graphs is a form: the result of passes on the original graph (the form named "") or on an earlier form.
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
from .library.fuse.pack import Unpack
from .library.fuse.unfuse import Unfuse
from .library.target.outputs import DropOutputs
from .library.target.sides import DECODER, ENCODER, EncoderSide, join_encoder_decoder
from .report import Report
from .runner import run_passes


@dataclass(frozen=True)
class Form:
    """The definition of a form: the result of `pipeline` on the form named `of` ("": the original graph)."""

    pipeline: Pipeline
    of: str = ""


def derive_graphs(
    graph: Graph,
    forms: Mapping[str, Form],
    *,
    verify: bool = False,
    dump: str | Path | None = None,
    report: Report | None = None,
) -> dict[str, Graph]:
    """Return the graph of each form by name, and `graph` under the name "". A form may derive from an earlier one.

    `verify`, `dump` and `report` are passed to `run_passes`; the dump of each form is a subfolder with its name.

    Raises:
        WeftError: as `run_passes` does; or if an encoder's output differs in type from its decoder's input.
    """
    graphs = {"": graph}
    for name, form in forms.items():
        folder = None if dump is None else Path(dump) / name
        graphs[name] = run_passes(graphs[form.of], form.pipeline, verify=verify, dump=folder, report=report)
    for side in (p for form in forms.values() for p in form.pipeline.passes if isinstance(p, EncoderSide)):
        join_encoder_decoder(graphs[ENCODER], graphs[DECODER], side.at).find_connections()
    return graphs


def canonicalize(graph: Graph, without: tuple[str, ...] = ()) -> Graph:
    """Return a copy of `graph` with fused ops expanded and linears unpacked, without duplicate or unused nodes.

    The outputs named in `without` are removed first.
    """
    dropping = (DropOutputs(without),) if without else ()
    folding = (FoldConstants(),) if any(map(is_fused, graph.nodes)) else ()  # packed weights are constants
    return run_passes(graph, Pipeline((Phase("", (*dropping, Unfuse(all=True), *folding, Unpack(), Cse(), Dce())),)))
