"""The Pass: one rewrite of a graph, with its arguments, its declared effect and the check of that effect.

A pass is a class; defining it makes a frozen dataclass of it and registers the pass. Its fields are its arguments, its
docstring is its documentation::

    class MhaToGqa(Pass):
        \"""Group the key and value heads …\"""

        name = "mha-to-gqa"
        effect = "lossy"
        kv_heads: int
        method: Literal["mean", "svd"] = "mean"

        def run(self, graph: Graph, trace: Trace) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, replace
from typing import Any, ClassVar, Literal

from weft.ir import DType, Graph, WeftError, interpret
from weft.ir.frozen import Frozen
from weft.ir.op import Attr, format_type
from weft.ir.recipes.recipe import order_fields
from weft.ir.recipes.spelling import spell
from weft.ir.registry import Registry
from weft.ir.types import dtypes

from .equivalence import EXACT, EquivalenceCheck
from .trace import Trace


@dataclass(frozen=True)
class Documentation:
    """The parts of a pass's docstring; a missing part is "".

    condition, source: the paragraph after that word and a colon; text: all other paragraphs after the summary.
    pipeline, graph: the example's pass with its arguments, and the IR text that it runs on, or the name of the pass
    whose example has the text.
    """

    summary: str
    text: str = ""
    condition: str = ""
    source: str = ""
    pipeline: str = ""
    graph: str = ""


def read_docstring(docstring: str) -> Documentation:
    """Split `docstring` into its parts; raise WeftError for a second paragraph ``Condition:`` or ``Source:``."""
    sections: dict[str, str] = {}
    text: list[str] = []
    body = inspect.cleandoc(docstring)
    if match := re.search(r"^Example (.+)::\n((?:(?:[ \t].*)?\n|[ \t].*\Z)+)", body + "\n", re.MULTILINE):
        sections["pipeline"], sections["graph"] = match[1], textwrap.dedent(match[2]).strip() + "\n"
        body = (body[: match.start()] + body[match.end() :]).strip()
    elif match := re.search(r"^Example (.+), on the graph of ([\w-]+)\.$", body, re.MULTILINE):
        sections["pipeline"], sections["graph"] = match[1], match[2]
        body = body.replace(match[0], "").strip()
    summary, *paragraphs = re.split(r"\n\s*\n", body)
    for paragraph in paragraphs:
        name, colon, rest = paragraph.partition(":")
        if colon and name in ("Condition", "Source"):
            if name.lower() in sections:
                raise WeftError(f"docstring {summary!r} has two paragraphs {name}")
            sections[name.lower()] = rest.strip()
        else:
            text.append(paragraph)
    return Documentation(" ".join(summary.split()), "\n\n".join(text), **sections)


Effect = Literal["exact", "conditional", "lossy", "changing"]
Purpose = Literal[
    "Simplify",
    "Fuse and take apart",
    "Fold into weights",
    "Same function, other weights",
    "Convert heads, cut heads and layers",
    "Positions and windows",
    "Exchange parts and grow",
    "Decode",
    "Numbers",
    "Look inside",
    "Targets",
    "Other",
]
PASSES: Registry[type[Pass]] = Registry("pass", "weft.passes.library weft.backends.python_names", "see `weft passes`")


class Argument(Attr):
    """An argument of a pass: a field of its dataclass, with name, type and default."""

    @property
    def type_text(self) -> str:
        """The type as documentation prints it, such as ``mean | svd`` for a Literal."""
        if typing.get_origin(self.type) is Literal:
            return " | ".join(typing.get_args(self.type))
        return format_type(self.type)

    def check(self, value: Any, op: str = "") -> Any:
        """Return `value` converted to the argument's type: lists to tuples, dtype names to `DType`s; ignore `op`.

        Raises:
            WeftError: if `value` does not have the type.
        """
        if typing.get_origin(self.type) is Literal:
            if value in typing.get_args(self.type):
                return value
            choices = ", ".join(typing.get_args(self.type))
            raise WeftError(f"{self.name}={_format_value(value)} must be one of {choices}")
        if DType in (self.type, *typing.get_args(self.type)) and isinstance(value, str):
            return dtypes.parse(value)
        try:
            return super().check(value, op)
        except WeftError:
            raise WeftError(f"{self.name}={_format_value(value)} is not of type {self.type_text}") from None


def _format_value(value: Any) -> str:
    return "none" if value is None else json.dumps(value) if isinstance(value, (str, bool)) else str(value)


class Pass(Frozen):
    """The base class of all passes."""

    name: ClassVar[str] = ""
    effect: ClassVar[Effect]
    purpose: ClassVar[Purpose] = "Other"
    see: ClassVar[tuple[str, ...]] = ()  # names of related passes, such as its inverse
    tradeoff: ClassVar[str] = ""  # a cost that may rise, and why that can be worth it
    needs: ClassVar[str] = ""  # the passes that have to run before it, as a pipeline
    on_fused: ClassVar[bool] = False  # whether it accepts graphs with fused ops, which other passes refuse
    idempotent: ClassVar[bool] = True  # whether a second run changes nothing

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            PASSES.add(cls.name, cls)

    def run(self, graph: Graph, trace: Trace) -> None:
        """Rewrite `graph` in place; the pipeline passes a copy of the caller's graph. Raise WeftError if it lacks
        something that the pass needs."""
        raise TypeError(f"pass {self.name} defines no run")

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that outputs before and after agree to 1e-12, on small random inputs and weights in float64.

        This is the check of exact passes. Conditional, lossy and changing passes override it; reports print the first
        paragraph of the override's docstring as the evidence.

        Raises:
            WeftError: if the effect does not hold.
        """
        if self.effect != "exact":
            raise TypeError(f"the {self.effect} pass {self.name} defines no check")
        inputs = equivalence.make_inputs(before)
        equivalence.check_close(equivalence.run(before, inputs), equivalence.run(after, inputs), EXACT)

    def apply_to(self, graph: Graph) -> Graph:
        """Return a copy of `graph` rewritten by this pass alone, without a trace."""
        rewritten = graph.clone()
        self.run(rewritten, Trace())
        return rewritten

    def check_keeps(self, graph: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that this pass does not change the outputs of `graph`, with its own weights, on random inputs."""
        inputs = equivalence.make_inputs(graph)
        equivalence.check_close(interpret(graph, inputs), interpret(self.apply_to(graph), inputs), EXACT)

    @classmethod
    def describe_check(cls) -> str:
        """Return the evidence of a successful check: the first paragraph of its docstring without "Check that"."""
        text = " ".join(inspect.cleandoc(cls.check.__doc__ or "").partition("\n\n")[0].split())
        return (evidence := text.removeprefix("Check that "))[:1].upper() + evidence[1:]

    def __str__(self) -> str:
        """Return the pass in pipeline syntax, ``name{argument=value}``, without arguments equal to their defaults."""
        values = ((a, getattr(self, a.name)) for a in self.arguments())
        arguments = [f"{a.name}={spell(value)}" for a, value in values if a.required or value != a.default]
        return self.name + (f"{{{', '.join(arguments)}}}" if arguments else "")

    @classmethod
    @functools.cache
    def arguments(cls) -> tuple[Argument, ...]:
        """Return the arguments of the pass in call order: positional ones, then keyword-only ones."""
        hints = typing.get_type_hints(cls)
        defaults = [(f, inspect.Parameter.empty if f.default is MISSING else f.default) for f in order_fields(cls)]
        return tuple(Argument(f.name, hints[f.name], default) for f, default in defaults)

    @classmethod
    def documentation(cls) -> Documentation:
        """Return the class docstring, split into its parts; the example has the text of its graph."""
        parts = read_docstring(cls.__doc__ or "")
        return replace(parts, graph=lookup(parts.graph).documentation().graph) if parts.graph in PASSES else parts

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> Pass:
        """Return an instance of the pass with the arguments `values` (by name), after checking and converting them.

        Raises:
            WeftError: on an unknown, missing or ill-typed argument.
        """
        arguments = {a.name: a for a in cls.arguments()}
        for name in values:
            if name not in arguments:
                takes = f"it takes {', '.join(arguments)}" if arguments else "it takes none"
                raise WeftError(f"pass {cls.name} has no argument {name!r}; {takes}")
        for a in arguments.values():
            if a.required and a.name not in values:
                raise WeftError(f"pass {cls.name} needs the argument {a.name} ({a.type_text})")
        try:
            return cls(**{name: arguments[name].check(value) for name, value in values.items()})
        except WeftError as e:
            raise WeftError(f"pass {cls.name}: {e}") from None


def all_passes() -> dict[str, type[Pass]]:
    """Return every pass by name, in alphabetical order."""
    return dict(sorted(PASSES.items()))


def lookup(name: str) -> type[Pass]:
    """Return the pass named `name`; raise WeftError, with the nearest names, if there is none."""
    longer = f"p{name}".replace("_", "-")  # `-ppack-qkv` is -p with its value, and so is -pack-qkv
    if name not in PASSES and longer in PASSES:
        raise WeftError(f"unknown pass {name!r}; -p{name} means -p {name}: for the pass {longer} write -p {longer}")
    return PASSES.lookup(name)
