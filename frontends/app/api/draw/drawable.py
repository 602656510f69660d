"""Networks to draw: from all sources, ONNX files of any exporter, and compiled folders."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.backends.runtime.compiled_folder import MANIFEST, read_manifest
from weft.backends.target import TARGETS
from weft.backends.viz.model.network import Network, build_network
from weft.backends.viz.onnx_files.onnx_network import join_networks, read_onnx_network
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.storage.documents import Record, expand_home
from weft.passes import run_passes

from ....formats.weft.model_folder import GRAPH
from ....model import Model
from ..source.sources import load_recorded_source, load_source

MODEL, ENCODER = "model.onnx", "encoder.onnx"


def read_network(source: Any, trust: bool = False) -> Network:
    """Read `source` as a network to draw: anything that `load_source` accepts, an ONNX file, or a compiled folder.

    Raises:
        WeftError: if it cannot be read, or is a PyTorch folder whose source is missing, has changed, or is code while
            `trust` is false.
    """
    path = _find_output(source)
    if path is None:
        return build_network(load_source(source).graph)
    if path.suffix == ".onnx":
        return read_onnx_network(path)
    if (path / MANIFEST).is_file():
        return _read_compiled(path, trust)
    return replace(read_onnx_network(path / MODEL), name=path.name)


def load_model(source: Any) -> Model | None:
    """Return the model that `source` is or names; None for an ONNX file or a compiled folder."""
    return load_source(source) if _find_output(source) is None else None


def _find_output(source: Any) -> Path | None:
    """Return the path of the ONNX file or compiled folder that `source` names; None for other sources, among them
    compiled folders that `load_source` reads."""
    path = expand_home(source) if isinstance(source, (str, Path)) else None
    if path is None or (path / GRAPH).is_file():  # a folder of target transformers is a source: it contains its graph
        return None
    is_onnx_folder = (path / MODEL).is_file() and not any(path.glob("*.safetensors"))  # with them it is a source
    return path if path.suffix == ".onnx" or (path / MANIFEST).is_file() or is_onnx_folder else None


def list_files(*sources: Any) -> list[Path]:
    """Return the existing files that `sources` name or were read from, which an output must not overwrite."""
    paths = (
        s.files if isinstance(s, Model) else (expand_home(s),) for s in sources if isinstance(s, (str, Path, Model))
    )
    return [path for group in paths for path in group if path.is_file()]


def _read_compiled(folder: Path, trust: bool) -> Network:
    """Return the model in a compiled folder as a network: from its ONNX files, or for PyTorch from its source."""
    manifest = read_manifest(folder)
    spec = manifest.record("source", {}).text("spec", None)
    target = TARGETS.get(manifest.text("target", ""))
    if target is not None and not target.opset:
        return build_network(_rebuild_graph(folder, manifest, trust))
    files = [folder / name for name in (ENCODER, MODEL) if (folder / name).is_file()]
    if not files:
        raise WeftError(f"{folder} has a {MANIFEST}, but no {MODEL}: it is incomplete; compile it again")
    merged = join_networks([read_onnx_network(file) for file in files])
    return replace(merged, name=_short_name(spec)) if spec else merged


def _rebuild_graph(folder: Path, manifest: Record, trust: bool) -> Graph:
    pipeline = manifest.text("pipeline", "")
    try:
        graph = load_recorded_source(folder, manifest, trust).graph
    except WeftError as e:
        raise WeftError(f"{folder} has no ONNX model to draw, and its source cannot be drawn: {e}") from e
    return run_passes(graph, pipeline) if pipeline else graph


def _short_name(spec: str) -> str:
    """Return the name of a source: the object after "model.py:", or a path's last component without suffix."""
    last = spec.rpartition(":")[2] if re.search(r"\.py:\w+$", spec) else Path(spec).name
    return re.sub(r"\.(gguf|weft|onnx|py)$", "", last)
