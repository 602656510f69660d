"""`weft.export`: a model, rewritten or not, as a checkpoint that others load."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from weft.backends.safetensors import Progress
from weft.ir.errors import WeftError
from weft.ir.storage import check_free
from weft.passes import Report

from ...model import SourceLike
from .rewriting import rewrite
from .source.sources import load_source

FORMATS = ("hf", "safetensors", "gguf")
_FILES = {".safetensors": "safetensors", ".gguf": "gguf"}  # suffix -> format
_OTHERS = {".onnx": "`weft compile` writes", ".weft": "`weft opt` writes", ".bin": "pickles are", ".pt": "pickles are"}


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
    """Write `source` (whatever `load_source` takes), rewritten by the pipeline `passes`, as a checkpoint of others.

    Args:
        format: ``hf``: a Hugging Face folder, for graphs that one of its families expresses; ``gguf``: a file for
            llama.cpp, for graphs of an architecture it has; ``safetensors``: a file of all parameters by their names.
            If None, what the suffix of `out` says: gguf, safetensors, or else hf.
        passes: pipeline text, or ``@path`` of a file that holds it.
        dtype: f32, f16, bf16, and for gguf q8_0; what holds the weights exactly if None. Weights that keep their codes
            have no such dtype.
        weights: how quantized weights are stored: ``codes``, as far as the format takes them, those of the source's
            checkpoint too; ``float``, the numbers that they stand for; ``auto``, the codes if the format takes those
            of all weights that a pass quantized.
        seed: of the random initialization, for sources without a checkpoint; 0 if None.
        adapters: folders of PEFT adapters to merge into the weights, one after the other.
        without: names of parts that may be left out although the model then computes something else.
        report: filled in with what the passes did.
        progress: called with (stage, bytes done, bytes in all).
        note: called with what is not kept as it was, a sentence each.

    Returns:
        The family or architecture that the graph was found to be of; "" for safetensors.

    Raises:
        WeftError: if the format is unknown, not that of the suffix, or cannot express the graph, or on any bad input;
            an older `out` survives.
    """
    from ...export.codes import check_weights

    format = _format(out, format)
    check_weights(weights)
    if weights != "auto" and format == "safetensors":
        raise WeftError(
            f"--weights {weights} is for hf and gguf: a file of safetensors stores the parameters as floats"
        )
    model = load_source(source, seed, adapters, without=without)
    for line in model.notices():
        note(line)
    if format == "hf":
        check_free(Path(out), model.files)
    if passes.strip():
        model = rewrite(model, passes, report=report)
    if format == "hf":
        from ...export.hf.folder import write_huggingface

        return write_huggingface(model, out, dtype=dtype, weights=weights, progress=progress, note=note).family
    if format == "gguf":
        from ...export.gguf.file import write_gguf

        return write_gguf(model, out, dtype=dtype, weights=weights, progress=progress, note=note)
    from ...export.parameters import write_parameters

    write_parameters(model, out, dtype=dtype, progress=progress)
    return ""


def _format(out: str | Path, kind: str | None) -> str:
    """The format to write, `kind` or by the suffix of `out`; a folder that is there, or a name that ends in /, is one.

    Raises:
        WeftError: if there is no such format, or the suffix says another.
    """
    if kind is not None and kind not in FORMATS:
        raise WeftError(f"unknown format {kind!r}; weft exports {', '.join(FORMATS)}")
    suffix = Path(out).suffix.lower()
    if str(out).endswith(os.sep) or Path(out).is_dir():
        return kind or "hf"
    named = _FILES.get(suffix)
    if kind is None and named is None and suffix in _OTHERS:
        raise WeftError(f"{out} is called what {_OTHERS[suffix]}; name a folder, or a file .gguf or .safetensors")
    if kind is not None and named not in (None, kind):
        what = "a folder" if kind == "hf" else f"a file .{kind}"
        raise WeftError(f"{out} is called a file of {named}, but --format {kind} writes {what}: change one of them")
    return kind or named or "hf"
