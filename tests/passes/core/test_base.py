"""Passes as classes: names, arguments, documentation."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest

from weft.ir import Graph, WeftError
from weft.passes import Pass, Trace, all_passes, lookup
from weft.passes.core.base import Documentation, read_docstring
from weft.passes.core.equivalence import EquivalenceCheck


@pytest.mark.parametrize("cls", all_passes().values(), ids=list(all_passes()))
def test_every_pass_is_documented_and_checked(cls: type[Pass]) -> None:
    assert cls.__doc__ and len(cls.__doc__.strip()) > 40
    assert cls.effect in ("exact", "conditional", "lossy", "changing")
    assert (cls.check is Pass.check) == (cls.effect == "exact")
    assert cls.run is not Pass.run and lookup(cls.name) is cls
    assert inspect.signature(cls).parameters.keys() == {a.name for a in cls.arguments()}
    for argument in cls.arguments():
        assert argument.type_text and (argument.required or argument.check(argument.default) == argument.default)


def test_pass_prints_arguments_other_than_defaults() -> None:
    assert str(lookup("cast").make({"dtype": "bf16"})) == "cast{dtype=bf16}"
    assert str(lookup("quantize").make({"bits": 8, "zeros": True})) == "quantize{bits=8}"
    assert str(lookup("dce").make({})) == "dce"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("dce", {"deep": True}, "pass dce has no argument 'deep'; it takes none"),
        ("sliding-window", {"keep_first": 1}, r"pass sliding-window needs the argument size \(int\)"),
        ("sliding-window", {"size": "three"}, 'pass sliding-window: size="three" is not of type int'),
        ("replace-norm", {"kind": "batch"}, 'pass replace-norm: kind="batch" must be one of rms, layer'),
    ],
)
def test_wrong_arguments_are_refused_by_name(name: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        lookup(name).make(values)


def test_unknown_pass_is_refused_with_near_names() -> None:
    with pytest.raises(WeftError, match=r"unknown pass 'fold-constant'.*fold-constants"):
        lookup("fold-constant")
    with pytest.raises(WeftError, match="-pack-qkv means -p ack-qkv: for the pass pack-qkv write -p pack-qkv"):
        lookup("ack-qkv")


def test_check_of_a_lossy_pass_must_be_defined() -> None:
    @dataclass(frozen=True)
    class Careless(Pass):
        effect = "lossy"

    with pytest.raises(TypeError, match="the lossy pass  defines no check"):
        Careless().check(Graph("a"), Graph("b"), EquivalenceCheck())
    with pytest.raises(TypeError, match="defines no run"):
        Careless().run(Graph("a"), Trace())


def test_docstring_has_summary_condition_source_and_example() -> None:
    found = read_docstring(
        """Fold it.

        W (g x) = (W g) x: so
        it goes.

        Second paragraph: with a colon.

        Condition: all readers are
        linear.

        Example fold{untie=true}::

            graph g {
              input %x: f32[3]

              output y = %x
            }

        Source: somebody, 2024.
        """
    )
    assert found == Documentation(
        "Fold it.",
        "W (g x) = (W g) x: so\nit goes.\n\nSecond paragraph: with a colon.",
        "all readers are\nlinear.",
        "somebody, 2024.",
        "fold{untie=true}",
        "graph g {\n  input %x: f32[3]\n\n  output y = %x\n}\n",
    )
    assert read_docstring("Only this.") == Documentation("Only this.")
    shared = read_docstring("Fold it.\n\nExample fold{untie=true}, on the graph of pack-qkv.")
    assert shared == Documentation("Fold it.", pipeline="fold{untie=true}", graph="pack-qkv")


def test_example_of_a_pass_may_have_the_graph_of_another() -> None:
    dilate, window = (lookup(name).documentation() for name in ("dilate", "sliding-window"))
    assert dilate.graph == window.graph and dilate.graph.startswith("graph example {")
    assert dilate.pipeline == "dilate{size=2, stride=3}"


def test_repeated_paragraph_is_refused() -> None:
    with pytest.raises(WeftError, match="two paragraphs Source"):
        read_docstring("A.\n\nSource: x\n\nSource: y")
