"""Options of targets: what can be asked of one besides its dtype, as fields with their help and their checks."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from weft.ir.errors import WeftError
from weft.passes.core.base import Argument

KEEP_BLOCKS = "keep_blocks"  # which weights stay in blocks
ARITHMETIC = "arithmetic"  # what sums of products by quantized weights are computed in, where not the fastest
ACTIVATIONS = "activations"  # what activations are rounded to
CACHE_DTYPE = "cache_dtype"  # what keys and values are kept in


MOVED = {  # options that targets had, and where their function is
    "tensor_parallel": "target transformers writes plans that torchrun, FSDP2 and vLLM follow (docs/scale.md)",
}


@dataclass(frozen=True)
class Options:
    """The options of a target; a subclass has a field for each, made by `option`."""

    def passes(self) -> dict[str, str]:
        """Return the passes that they ask for, by the name of the option, after all others but those of the target."""
        return {}

    @classmethod
    def listed(cls) -> dict[str, Option]:
        """Return the options by name."""
        hints = typing.get_type_hints(cls)
        return {f.name: Option(f.name, hints[f.name], f.default, **f.metadata) for f in dataclasses.fields(cls)}


class OptionKeywords(TypedDict, total=False):
    """The options of weft's own targets as keywords, for type checkers; a test holds them against the targets."""

    activations: str
    arithmetic: str
    cache_dtype: str
    class_name: str
    keep_blocks: str
    prepack: bool


def option(default: Any, help: str) -> Any:
    """Return a field of `Options`."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Option(Argument):
    """An option: what commands make their flags, help and messages of."""

    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that can be given, where they are a few words."""
        return tuple(word for word in typing.get_args(self.type) if word) if self.is_choice else ()

    @property
    def type_text(self) -> str:
        return " | ".join(self.choices) or super().type_text

    @property
    def is_choice(self) -> bool:
        return typing.get_origin(self.type) is Literal

    def check(self, value: Any, op: str = "") -> Any:
        """Return `value` in canonical form.

        Raises:
            WeftError: if the option cannot have it.
        """
        if self.is_choice and value not in typing.get_args(self.type):
            raise WeftError(f"{self.flag} {value!r} is not known; it takes {' or '.join(self.choices)}")
        return super().check(value, op)


@dataclass(frozen=True)
class CacheOptions(Options):
    """Options of a target with caches of integers."""

    cache_dtype: Literal["", "int8", "int4"] = option(
        "", "Keep keys and values as integers of 8 or 4 bits, with scales fitted to a text by the pass quantize-cache"
    )

    def passes(self) -> dict[str, str]:
        return {**super().passes(), **cache_passes(self.cache_dtype)}


def no_effect(option: str, reason: str) -> WeftError:
    """Return the refusal of an `option`, such as ``--arithmetic f32``, that changes nothing for this `reason`."""
    return WeftError(f"{option} has no effect here, so leave it out: {reason}")


def cache_passes(dtype: str) -> dict[str, str]:
    """Return the text of the pass quantize-cache for ``int8`` or ``int4``, by option; {} for other dtypes."""
    bits = dtype.removeprefix("int")
    return {} if bits == dtype else {CACHE_DTYPE: f"quantize-cache{{bits={bits}}}"}


@dataclass(frozen=True)
class BlockOptions(Options):
    """Options of a target that multiplies by the quantized blocks of a checkpoint."""

    keep_blocks: Literal["", "head", "all"] = option(
        "",
        "Keep the checkpoint's 4- and 8-bit blocks quantized, in the output head or everywhere: smaller, and faster "
        "for one text on CPUs by ONNX Runtime",
    )

    def passes(self) -> dict[str, str]:
        kept = {KEEP_BLOCKS: f"keep-blocks{{which={self.keep_blocks}}}"} if self.keep_blocks else {}
        return {**super().passes(), **kept}
