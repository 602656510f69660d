"""`weft.export`: a model, rewritten or not, as a checkpoint for other tools."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from weft.backends.safetensors import Progress, count_written, parse_stored, write_file
from weft.ir.errors import WeftError
from weft.ir.storage import check_replaceable, replace_file
from weft.passes import Report
from weft.passes.core.resume import choose_store, remove_results
from weft.passes.library.cleanup.training_noise import has_dropout

from ...formats.weft.model_folder import collect_weights
from ...model import Model, SourceLike
from .rewrite import rewrite
from .source.sources import load_source


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


FORMATS = ("hf", "safetensors", "gguf")
_FILES = {".safetensors": "safetensors", ".gguf": "gguf"}  # suffix -> format
_FOREIGN_FILES = {  # suffix -> reason why export does not write it
    ".onnx": "`weft compile` writes ONNX",
    ".weft": "`weft opt` writes IR text",
    **dict.fromkeys((".bin", ".pt"), "weft writes no pickles"),
}


def export(
    source: SourceLike,
    out: str | Path,
    *,
    format: str | None = None,
    passes: str = "",
    dtype: str | None = None,
    weights: str = "auto",
    seed: int | None = None,
    adapters: Sequence[str | Path] = (),
    without: Sequence[str] = (),
    report: Report | None = None,
    progress: Progress = lambda stage, done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> str:
    """Write `source` (anything that `load_source` accepts), rewritten by the pipeline `passes`, as a checkpoint.

    Args:
        format: ``hf``: a Hugging Face folder, for graphs that one of weft's families expresses; ``gguf``: a file for
            llama.cpp, for graphs of its architectures; ``safetensors``: a file of all parameters by their names.
            If None, it follows from the suffix of `out`: gguf, safetensors, or else hf.
        passes: pipeline as a string, or ``@path`` of a file with one.
        dtype: f32, f16, bf16, and for gguf q8_0; if None, the smallest that represents the weights exactly. It does not
            apply to weights that are stored as codes.
        weights: the storage of quantized weights: ``codes``, all that the format supports, including blocks of the
            source's checkpoint; ``float``, dequantized values; ``auto``, codes if the format supports them for all
            weights that a pass quantized.
        seed: of the random initialization, for sources without a checkpoint; 0 if None.
        adapters: folders of PEFT adapters to merge into the weights, in this order.
        without: names of parts of the source to leave out, although the model's outputs then change.
        report: receives the records of the passes.
        progress: called with (stage, bytes done, total bytes).
        note: called with each note on the source, and with a sentence per change of stored values.

    Returns:
        The family or architecture that expresses the graph; "" for safetensors.

    Raises:
        WeftError: if the format is unknown, differs from the suffix, or cannot express the graph, or on any bad input;
            an older `out` then survives.
    """
    from ...export.stored_codes import check_weights

    format = _select_format(out, format)
    check_weights(weights)
    if weights != "auto" and format == "safetensors":
        raise WeftError(f"--weights {weights} needs format hf or gguf: safetensors files store parameters as floats")
    model = load_source(source, seed, adapters, without=without)
    for line in model.notices():
        note(line)
    if format == "hf":
        check_replaceable(Path(out), model.files)
    if passes.strip():
        model = rewrite(model, passes, report=report, store=choose_store(out))
    if has_dropout(model.graph):
        model = rewrite(model, "drop-dropout", report=report)
    family = ""
    if format == "hf":
        from ...export.hf.hf_folder import write_huggingface

        family = write_huggingface(model, out, dtype=dtype, weights=weights, progress=progress, note=note).family
    elif format == "gguf":
        from ...export.gguf.file import write_gguf

        family = write_gguf(model, out, dtype=dtype, weights=weights, progress=progress, note=note)
    else:
        from ...app.api.export import write_parameters

        write_parameters(model, out, dtype=dtype, progress=progress)
    remove_results(choose_store(out))
    return family


def _select_format(out: str | Path, kind: str | None) -> str:
    """Return the format to write: `kind`, else that of the suffix of `out`, else hf; folders count as without suffix.

    Raise WeftError if `kind` is unknown or contradicts the suffix, or, without `kind`, export cannot write such a file.
    """
    if kind is not None and kind not in FORMATS:
        raise WeftError(f"unknown format {kind!r}; weft exports {', '.join(FORMATS)}")
    suffix = Path(out).suffix.lower()
    if str(out).endswith(os.sep) or Path(out).is_dir():
        return kind or "hf"
    by_suffix = _FILES.get(suffix)
    if kind is None and by_suffix is None and suffix in _FOREIGN_FILES:
        raise WeftError(f"{out}: {_FOREIGN_FILES[suffix]}; name a folder, or a .gguf or .safetensors file")
    if kind is not None and by_suffix not in (None, kind):
        output = "a folder" if kind == "hf" else f"a .{kind} file"
        raise WeftError(f"{out} has the suffix of a {by_suffix} file, but --format {kind} writes {output}: change one")
    return kind or by_suffix or "hf"
