"""Comparison of the weights in a compiled folder with their recipes; it also returns the source's quantized graph.

Codes that are rounded to the nearest are computed again and compared bit by bit, as are all other weights. Codes that
were fitted to a text are not computed again: the module `fitted` takes them from the folder.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.backends.target import TARGETS
from weft.backends.weights import StoredTensor
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.recipes.streams import stream_rows
from weft.ir.storage.documents import Record
from weft.passes import Phase, Pipeline, parse_pipeline, run_passes
from weft.passes.core.base import Pass
from weft.passes.forms import derive_graphs
from weft.passes.library.quantize.quantize import QuantizeWeights
from weft.passes.library.quantize.scale_channels import ScaleChannels
from weft.passes.runner import Progress

from ....formats.hf import SafetensorsReader
from ....model import Model
from .fitted import FittedMatrices


@dataclass(frozen=True)
class WeightCheck:
    """Comparison of a folder's weights with their recipes.

    tensors: number compared bit by bit. wrong: description of the first that differs, None without one.
    fitted: number of matrices with codes fitted to a text; these are not computed again: the reference multiplies by
    their dequantized values. farthest: largest ‖W − Ŵ‖ / ‖W‖ of a fitted matrix.
    """

    tensors: int
    fitted: int
    farthest: float | None
    wrong: str | None

    @property
    def passed(self) -> bool:
        """Return whether all tensors equal their recipes, and fitted matrices are closer to the original than zeros."""
        return self.wrong is None and (self.farthest is None or self.farthest < 1)


def has_quantization(pipeline: Pipeline) -> bool:
    """Return whether a pass of `pipeline` quantizes weights."""
    return any(isinstance(step, QuantizeWeights) for step in pipeline.passes)


def check_weights(
    folder: Path, manifest: Record, model: Model, progress: Progress
) -> tuple[Graph, Pipeline, WeightCheck]:
    """Compare the weights in `folder` with the recipes of the source `model` after the manifest's pipeline.

    Return (graph, rest, check): the source's graph after its passes up to the last that quantizes, with the folder's
    fitted codes; the passes after these; and the result of the comparison.

    Raise WeftError if the weights cannot be read, the source cannot be rewritten, or later passes change fitted
    matrices so that their codes cannot be recovered.
    """
    pipeline = parse_pipeline(manifest.text("pipeline", ""))
    first, rest = _split_pipeline(pipeline)
    uses_fitting = any(_is_fitted(step, model.graph) for step in first.passes)
    graph = run_passes(model.graph, round_to_nearest(first, exact=True))
    codes = FittedMatrices(graph) if uses_fitting else None
    tensors, reader = _find_expected_tensors(folder, manifest, graph, rest)
    arrays = _read_arrays(folder, manifest, tensors)
    wrong = next(_find_misfits(tensors, arrays), None)
    distances: dict[str, float] = {}
    if codes is not None and wrong is None:
        try:
            tensors = codes.set_codes(tensors, arrays)
        except WeftError as error:
            message = f"{folder}: the weights quantized on a calibration text cannot be compared with the source"
            raise WeftError(f"{message}: {error}") from error
        distances = dict(codes.measure_distances())
    if wrong is None:
        wrong = next(_find_differences(tensors, arrays, reader, progress), None)
    farthest = max(distances, key=distances.__getitem__, default=None)
    if farthest is not None and not distances[farthest] < 1 and wrong is None:
        wrong = f"{farthest} is not closer to the original than zeros: its relative error is {distances[farthest]:.2f}"
    return graph, rest, WeightCheck(len(tensors), len(distances), distances[farthest] if farthest else None, wrong)


class _RoundedWeights(QuantizeWeights):
    """A pass that keeps the blocks of a checkpoint, and rounds all other weights to the nearest code."""

    uses_fitting = uses_search = False


def round_to_nearest(pipeline: Pipeline, exact: bool) -> Pipeline:
    """Return `pipeline` with rounding to the nearest code instead of fitting to a text, which only a bit budget reads.

    `exact`: keep also steps that change values but not sizes: the pass scale-channels (else it is removed), which reads
    a text, and the search for scales by the weights alone in quantizing passes (else they round to the nearest).
    """

    def simplify(step: Pass) -> Pass:
        if not isinstance(step, QuantizeWeights) or (exact and step.uses_search):
            return step
        if step.method in ("auto", "hqq") and step.calibration is None and step.budget is None:
            return _RoundedWeights(**asdict(step))
        return replace(step, method="rtn", calibration=None if step.budget is None else step.calibration)

    steps = [(p, [s for s in p.passes if exact or not isinstance(s, ScaleChannels)]) for p in pipeline.phases]
    return Pipeline(tuple(replace(phase, passes=tuple(map(simplify, passes))) for phase, passes in steps))


def _split_pipeline(pipeline: Pipeline) -> tuple[Pipeline, Pipeline]:
    """Return the passes up to the last that quantizes, and those after it."""
    steps = [(phase.name, step) for phase in pipeline.phases for step in phase.passes]
    n_first = max(i for i, (_, step) in enumerate(steps) if isinstance(step, QuantizeWeights)) + 1
    parts = (tuple(Phase(name, (step,)) for name, step in part) for part in (steps[:n_first], steps[n_first:]))
    first, rest = map(Pipeline, parts)
    return first, rest


def _is_fitted(step: Pass, graph: Graph) -> bool:
    if not isinstance(step, QuantizeWeights):
        return False
    has_text = graph.tokenize is not None or step.calibration is not None
    return step.uses_fitting and (step.method == "gptq" or has_text)


def _find_expected_tensors(
    folder: Path, manifest: Record, graph: Graph, rest: Pipeline
) -> tuple[Mapping[str, StoredTensor], TensorReader]:
    """Return the tensors that the folder's target stores for `graph` after the passes `rest`, and their reader."""
    backend = TARGETS.lookup(manifest.text("target"))
    options_of_target = backend.options.list_all()
    recorded: dict[str, Any] = {"keep_blocks": manifest.text("kept_blocks", ""), "arithmetic": ""}
    if "opset" in manifest:
        recorded["opset"] = manifest.integer("opset")
    if "layout" in manifest:
        recorded |= {"layout": manifest.text("layout"), "precisions": manifest.text("precision")}
    if "blocks" in manifest and "arithmetic" not in manifest:
        recorded["arithmetic"] = "f32"
    options = backend.choose({name: value for name, value in recorded.items() if name in options_of_target})
    backend = backend.specialize(options).list_variants(options, None, None)[0].target
    compiled, length = run_passes(graph, rest), manifest.integer("max_length", least=1)
    forms = derive_graphs(compiled, backend.forms(compiled, options))
    built = backend.build(forms, manifest.text("dtype"), length, options, [])
    tensors: Mapping[str, StoredTensor] | None = getattr(built, "tensors", None)
    if tensors is None:
        raise WeftError(f"{folder}: target {backend.name} does not describe its tensors, so weights cannot be compared")
    return tensors, compiled.reader


def _read_arrays(folder: Path, manifest: Record, tensors: Mapping[str, StoredTensor]) -> dict[str, Array]:
    """Return the folder's arrays that `tensors` names; missing ones are left out. Arrays of ONNX are memory-mapped."""
    if any(folder.glob("*.safetensors")):
        reader = SafetensorsReader(folder)
        keys = set(reader.keys())
        stored_dtypes = {name: reader.dtype(name).numpy for name in tensors if name in keys}
        widened = {name: reader.read(name, 0, (reader.shape(name) or (1,))[0]) for name in stored_dtypes}
        return {name: array.astype(stored_dtypes[name], copy=False) for name, array in widened.items()}  # exact
    import onnx_ir as onnx

    arrays: dict[str, Array] = {}
    files = manifest.get("models", list[str], [file.name for file in sorted(folder.glob("*.onnx"))])
    for file in files:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Ignoring unknown external data key")  # those of prepacked weights
            model = onnx.load(folder / file)
        for name, value in model.graph.initializers.items():
            if name in tensors and value.const_value is not None:
                arrays[name] = value.const_value.numpy()
    return arrays


def _find_misfits(tensors: Mapping[str, StoredTensor], arrays: Mapping[str, Array]) -> Iterator[str]:
    for name, tensor in tensors.items():
        if name not in arrays:
            yield f"{name} is not in the folder"
        elif arrays[name].shape != tensor.shape:
            yield f"{name} has the shape {list(arrays[name].shape)}, but that of its recipe is {list(tensor.shape)}"
        elif arrays[name].dtype != tensor.dtype.numpy:
            yield f"{name} is stored as {arrays[name].dtype}, but its recipe yields {tensor.dtype}"


def _find_differences(
    tensors: Mapping[str, StoredTensor], arrays: Mapping[str, Array], reader: TensorReader, progress: Progress
) -> Iterator[str]:
    """Yield a sentence for each tensor whose bits differ from the result of its recipe."""
    done, total = 0, sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        start, flat = 0, np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
        for block in stream_rows(tensor.recipe, reader):
            expected = np.ascontiguousarray(np.atleast_1d(block).astype(tensor.dtype.numpy, copy=False))
            expected_bytes = expected.reshape(-1).view(np.uint8)
            stored_bytes = flat[start : start + len(expected_bytes)]
            if not np.array_equal(stored_bytes, expected_bytes):
                position = int(np.argmax(stored_bytes != expected_bytes))
                yield (
                    f"{name} differs from its recipe: "
                    f"byte {start + position:,} is {stored_bytes[position]}, not {expected_bytes[position]}"
                )
                break
            start += len(expected_bytes)
        done += tensor.nbytes
        progress("comparing weights", done, total)
