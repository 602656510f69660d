"""Weights that are packed at compile time for ONNX Runtime's CPU kernels.

ONNX Runtime packs every constant matrix when it opens a model, into newly allocated memory. A model file may also store
the packed form (``prepacked_0`` among a tensor's external data: kernel and content hash, then offset and length). The
runtime still packs, but if the hashes match it maps the file's copy and frees its own. A CPU with another packed layout
gets another hash and keeps its own copy, so results never change. Blocks that start on a huge page are mapped with huge
pages where the file system supports it: fewer page walks per token.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError

from ..runtime.ort.session import import_onnxruntime, join_lines, list_ort_errors
from .export import DATA, MODEL, PAGE

HUGE_PAGE = 2 << 20
COPY = 4 << 20  # bytes copied at a time


def prepack(folder: Path, name: str = MODEL) -> int:
    """Append packed copies of the weights of model `name` in `folder` to its data file, and reference them in the model
    file; return the number of bytes added (0: ONNX Runtime packs none). It needs memory and temporary disk space for
    the packed model. Raises WeftError if ONNX Runtime is not installed or cannot write the packed model, and OSError as
    the file system reports it."""
    import onnx

    model = onnx.load(folder / name, load_external_data=False)
    weights = {t.name: t for t in model.graph.initializer if t.external_data}
    path = folder / DATA
    before = path.stat().st_size
    with tempfile.TemporaryDirectory(prefix="packed-", dir=folder) as scratch:
        packed = _save_packed(folder / name, Path(scratch))
        entries = [
            (weights[tensor.name], entry)
            for tensor in packed.graph.initializer
            for entry in tensor.external_data
            if entry.key.startswith("prepacked_") and tensor.name in weights
        ]
        if not entries:  # for small weights ONNX Runtime writes no data file at all
            return 0
        with (Path(scratch) / DATA).open("rb") as source, path.open("r+b") as target:
            end = before
            for weight, entry in entries:
                value, end = _append_block(entry.value, source, target, end)
                weight.external_data.add(key=entry.key, value=value)
    onnx.save(model, folder / name)
    return end - before


def _save_packed(model: Path, out: Path) -> Any:
    """Return `model`, written by ONNX Runtime with packed weights into the folder `out`, without external data."""
    import onnx

    ort = import_onnxruntime()
    options = ort.SessionOptions()
    # The lowest level that folds casts of scales, because a kernel packs constant scales together with the codes.
    # Higher levels would rename weights, which `prepack` looks up by name in the original model.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(out / MODEL)
    options.log_severity_level = 3
    for key, value in {
        "session.save_external_prepacked_constant_initializers": "1",
        "session.optimized_model_external_initializers_file_name": DATA,
        "session.optimized_model_external_initializers_min_size_in_bytes": str(PAGE),
    }.items():
        options.add_session_config_entry(key, value)
    try:
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except list_ort_errors() as error:
        raise WeftError(
            f"ONNX Runtime could not pack the weights ({join_lines(error)}): is there disk space for a copy?"
        ) from error
    return onnx.load(out / MODEL, load_external_data=False)


def _append_block(entry: str, source: Any, target: Any, end: int) -> tuple[str, int]:
    """Copy a block from file `source` to file `target`; return its `entry` ("kernel+hash|offset;length;…") with the new
    location, and the new end. The location in `entry` is that in `source`. In `target` the block begins at the first
    page boundary from `end` on; at a boundary of huge pages if it has 2 MiB or more."""
    key, location = entry.rsplit("|", 1)
    offset, length, *rest = location.split(";")
    align = HUGE_PAGE if int(length) >= HUGE_PAGE else PAGE
    start = -(-end // align) * align
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(target.fileno(), end, start + int(length) - end)
    source.seek(int(offset))
    target.seek(start)
    for copied in range(0, int(length), COPY):
        target.write(source.read(min(COPY, int(length) - copied)))
    return f"{key}|{';'.join([str(start), length, *rest])}", start + int(length)
