"""Options of targets other than the dtype: dataclass fields with help and checks."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from weft.ir.errors import WeftError
from weft.passes.core.base import Argument

KEEP_BLOCKS = "keep_blocks"  # which weights stay in blocks
ARITHMETIC = "arithmetic"  # the arithmetic of products by quantized weights, if not the fastest
ACTIVATIONS = "activations"  # the dtype to which activations are rounded
CACHE_DTYPE = "cache_dtype"  # the dtype of cached keys and values


MOVED = {  # removed options, and their replacements
    "tensor_parallel": "target transformers writes plans that torchrun, FSDP2 and vLLM follow (docs/scale.md)"
}


@dataclass(frozen=True)
class Options:
    """The options of a target; a subclass has a field for each, defined by `option`."""

    def passes(self) -> dict[str, str]:
        """Return a dict from option to the text of the passes it requests; these run before the target's own passes."""
        return {}

    @classmethod
    def list_all(cls) -> dict[str, Option]:
        """Return a dict from the name of each option of this target to its `Option`."""
        hints = typing.get_type_hints(cls)
        return {f.name: Option(f.name, hints[f.name], f.default, **f.metadata) for f in dataclasses.fields(cls)}


class OptionKeywords(TypedDict, total=False):
    """The options of weft's own targets as keywords, for type checkers; a test compares them with the targets."""

    activations: str
    arithmetic: str
    cache: str
    cache_dtype: str
    class_name: str
    javascript: str
    keep_blocks: str
    layout: str
    opset: int
    page: str
    precisions: str
    prepack: bool
    runtime: str


def option(default: Any, help: str, flag: str = "") -> Any:
    """Return a dataclass field of `Options` with this `default` and `help`; `flag` defaults to the field's name."""
    return dataclasses.field(default=default, metadata={"help": help, "spelled": flag})


@dataclass(frozen=True)
class Option(Argument):
    """The description of an option of a target, from which commands derive flags, help and messages."""

    help: str
    spelled: str = ""

    @property
    def flag(self) -> str:
        return self.spelled or "--" + self.name.replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the accepted words of a choice option, without ""; () for other options."""
        return tuple(word for word in typing.get_args(self.type) if word) if self.is_choice else ()

    @property
    def type_text(self) -> str:
        return " | ".join(self.choices) or super().type_text

    @property
    def is_choice(self) -> bool:
        return typing.get_origin(self.type) is Literal

    def check(self, value: Any, op: str = "") -> Any:
        """Return `value` in the canonical form of the type; ignore `op`. Raises WeftError if the option rejects it."""
        if self.is_choice and value not in typing.get_args(self.type):
            raise WeftError(f"{self.flag} {value!r} is unknown: choose {' or '.join(self.choices)}")
        return super().check(value, op)


@dataclass(frozen=True)
class CacheOptions(Options):
    """Options of a target that can store KV caches as integers."""

    cache_dtype: Literal["", "int8", "int4"] = option(
        "", "Keep keys and values as integers of 8 or 4 bits, with scales fitted to a text by the pass quantize-cache"
    )

    def passes(self) -> dict[str, str]:
        return {**super().passes(), **list_cache_passes(self.cache_dtype)}


def make_no_effect_error(option: str, reason: str) -> WeftError:
    """Return the error that `option`, as written (``--arithmetic f32``), has no effect for this `reason`."""
    return WeftError(f"{option} has no effect here, so leave it out: {reason}")


def list_cache_passes(dtype: str) -> dict[str, str]:
    """Return {"cache_dtype": the text of the pass quantize-cache} for ``int8`` and ``int4``; {} for other dtypes."""
    bits = dtype.removeprefix("int")
    return {} if bits == dtype else {CACHE_DTYPE: f"quantize-cache{{bits={bits}}}"}


@dataclass(frozen=True)
class BlockOptions(Options):
    """Options of a target that can multiply by the quantized blocks of a checkpoint without dequantizing them first."""

    keep_blocks: Literal["", "head", "all"] = option(
        "",
        "Keep the checkpoint's 4- and 8-bit blocks quantized, in the output head or everywhere: smaller, and faster "
        "for one text on CPUs by ONNX Runtime",
    )

    def passes(self) -> dict[str, str]:
        requested = {KEEP_BLOCKS: f"keep-blocks{{which={self.keep_blocks}}}"} if self.keep_blocks else {}
        return {**super().passes(), **requested}
