"""The weights in a compiled folder held against their recipes, and the source as those of its passes that round leave
it.

Codes that are rounded to the nearest are made again and compared bit by bit, as is every other weight. Codes that are
fitted to a text are taken from the folder (`fitted`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.backends.targets import TARGETS
from weft.backends.weights import StoredTensor
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes.readers import Array, TensorReader
from weft.ir.recipes.streams import stream
from weft.ir.storage.documents import Record
from weft.passes import Phase, Pipeline, parse_pipeline, run_passes
from weft.passes.core.base import Pass
from weft.passes.forms import make_forms
from weft.passes.library.quantize.quantize import QuantizeWeights
from weft.passes.runner import Progress

from ....formats.hf import SafetensorsReader
from ....model import Model
from ..inspect.weight_sizes import nearest
from .fitted import Fitted


@dataclass(frozen=True)
class WeightCheck:
    """Comparison of a folder's weights with their recipes: `tensors` of them bit by bit, and the first that is `wrong`.

    `fitted` matrices have codes that were fitted to a text. They are not made again: the reference multiplies by what
    they stand for, and `farthest` is how far the one that lost most is from what was rounded, ‖W − Ŵ‖ / ‖W‖.
    """

    tensors: int
    fitted: int
    farthest: float | None
    wrong: str | None

    @property
    def passed(self) -> bool:
        """Return whether all tensors are as their recipes say, and all fitted matrices nearer to the original than
        zeros."""
        return self.wrong is None and (self.farthest is None or self.farthest < 1)


def quantizes(pipeline: Pipeline) -> bool:
    """Return whether a pass of `pipeline` rounds weights to codes."""
    return any(isinstance(step, QuantizeWeights) for step in pipeline.passes)


def check_weights(
    folder: Path, manifest: Record, model: Model, progress: Progress
) -> tuple[Graph, Pipeline, WeightCheck]:
    """Compare the weights in `folder` with what the source `model` and the pipeline of the manifest make them.

    Returns the source after its passes up to the last that rounds, with fitted codes as the folder has them, the passes
    after that, and the result of the comparison.

    Raises:
        WeftError: if the weights cannot be read, the source cannot be rewritten, or passes after the last that rounds
            change fitted matrices so that their codes cannot be had again.
    """
    pipeline = parse_pipeline(manifest.text("pipeline", ""))
    first, rest = _parted(pipeline)
    fits = any(_fits(step, model.graph) for step in first.passes)
    graph = run_passes(model.graph, nearest(first, searches=True))
    codes = Fitted(graph) if fits else None
    tensors, reader = _tensors(folder, manifest, graph, rest)
    arrays = _read(folder, tensors)
    wrong = next(_misfits(tensors, arrays), None)
    distances: dict[str, float] = {}
    if codes is not None and wrong is None:
        try:
            tensors = codes.take(tensors, arrays)
        except WeftError as error:
            raise WeftError(f"{folder}: {error}, so the codes that were fitted cannot be compared") from error
        distances = dict(codes.distances())
    if wrong is None:
        wrong = next(_differences(tensors, arrays, reader, progress), None)
    farthest = max(distances, key=lambda name: distances[name], default=None)
    if farthest is not None and not distances[farthest] < 1 and wrong is None:
        wrong = (
            f"{farthest} is {distances[farthest]:.2f} of its own size away from the original, farther than zeros are"
        )
    check = WeightCheck(len(tensors), len(distances), distances[farthest] if farthest else None, wrong)
    return graph, rest, check


def _parted(pipeline: Pipeline) -> tuple[Pipeline, Pipeline]:
    """The passes up to the last that rounds, and those after it."""
    steps = [(phase.name, step) for phase in pipeline.phases for step in phase.passes]
    last = max(i for i, (_, step) in enumerate(steps) if isinstance(step, QuantizeWeights)) + 1
    parts = (tuple(Phase(name, (step,)) for name, step in part) for part in (steps[:last], steps[last:]))
    first, rest = map(Pipeline, parts)
    return first, rest


def _fits(step: Pass, graph: Graph) -> bool:
    """Return whether `step` fits codes of `graph` to a text."""
    if not isinstance(step, QuantizeWeights):
        return False
    has_text = graph.tokenize is not None or step.calibration is not None
    return step.fits and (step.method == "gptq" or has_text)


def _tensors(
    folder: Path, manifest: Record, graph: Graph, rest: Pipeline
) -> tuple[Mapping[str, StoredTensor], TensorReader]:
    """Return the tensors that the folder's target stores of `graph` after the passes of `rest`, and their reader."""
    backend = TARGETS.lookup(manifest.text("target"))
    known = backend.options.listed()
    given: dict[str, Any] = {"keep_blocks": manifest.text("kept_blocks", ""), "arithmetic": ""}
    if "blocks" in manifest and "arithmetic" not in manifest:
        given["arithmetic"] = "f32"
    options = backend.choose({name: value for name, value in given.items() if name in known})
    compiled, length = run_passes(graph, rest), manifest.integer("max_length", least=1)
    forms = make_forms(compiled, backend.forms(compiled, options))
    built = backend.build(forms, manifest.text("dtype"), length, options, [])
    tensors: Mapping[str, StoredTensor] | None = getattr(built, "tensors", None)
    if tensors is None:
        raise WeftError(f"{folder}: target {backend.name} does not say what it stores, so weights cannot be compared")
    return tensors, compiled.reader


def _read(folder: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, Array]:
    """The folder's tensors of these names; those of ONNX are mapped, and read when they are looked at."""
    if any(folder.glob("*.safetensors")):
        reader = SafetensorsReader(folder)
        keys = set(reader.keys())
        known = {name: reader.dtype(name).numpy for name in tensors if name in keys}
        whole = {name: reader.read(name, 0, (reader.shape(name) or (1,))[0]) for name in known}
        return {name: array.astype(known[name], copy=False) for name, array in whole.items()}  # widened exactly
    import onnx_ir as onnx

    found: dict[str, Array] = {}
    for file in sorted(folder.glob("*.onnx")):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Ignoring unknown external data key")  # those of prepacked weights
            model = onnx.load(file)
        for name, value in model.graph.initializers.items():
            if name in tensors and value.const_value is not None:
                found[name] = value.const_value.numpy()
    return found


def _misfits(tensors: Mapping[str, StoredTensor], arrays: Mapping[str, Array]) -> Iterator[str]:
    for name, tensor in tensors.items():
        if name not in arrays:
            yield f"{name} is not in the folder"
        elif arrays[name].shape != tensor.shape:
            yield f"{name} has the shape {list(arrays[name].shape)}, and its recipe makes {list(tensor.shape)}"
        elif arrays[name].dtype != tensor.dtype.numpy:
            yield f"{name} is stored as {arrays[name].dtype}, and its recipe as {tensor.dtype}"


def _differences(
    tensors: Mapping[str, StoredTensor], arrays: Mapping[str, Array], reader: TensorReader, progress: Progress
) -> Iterator[str]:
    """Sentences about tensors that are not, bit by bit, what their recipes make."""
    done, total = 0, sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        start, flat = 0, np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
        for block in stream(tensor.recipe, reader):
            want = np.ascontiguousarray(np.atleast_1d(block).astype(tensor.dtype.numpy, copy=False))
            bytes_wanted = want.reshape(-1).view(np.uint8)
            found = flat[start : start + len(bytes_wanted)]
            if not np.array_equal(found, bytes_wanted):
                at = int(np.argmax(found != bytes_wanted))
                yield f"{name} is not what its recipe makes: byte {start + at:,} is {found[at]}, not {bytes_wanted[at]}"
                break
            start += len(bytes_wanted)
        done += tensor.nbytes
        progress("comparing weights", done, total)
