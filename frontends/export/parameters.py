"""Export of the parameters of a graph, by their names, as one safetensors file."""

from __future__ import annotations

from pathlib import Path

from weft.backends.safetensors import Progress, count_written, parse_stored, write_file
from weft.ir.storage import replace_file

from ..formats.weft.model_folder import collect_weights
from ..model import Model


def write_parameters(
    model: Model, out: str | Path, *, dtype: str | None = None, progress: Progress = lambda stage, done, total: None
) -> None:
    """Write every parameter of `model` that stores weights to the safetensors file `out`, atomically.

    They are stored in `dtype` (f32, f16, bf16), or each in the dtype of `find_exact_dtype`.

    Raises:
        WeftError: if `out` cannot be written, or a value exceeds the range of `dtype`.
    """
    tensors = collect_weights(model.graph, None if dtype is None else parse_stored(dtype))
    with replace_file(Path(out), model.files) as partial:
        write_file(partial, tensors, count_written(progress, tensors))
        model.check_unchanged()
