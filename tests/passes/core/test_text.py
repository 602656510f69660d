"""Pipelines as text: arguments, defaults, removal, phases, and what is said about mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pytest

from weft.ir import DType, Graph, WeftError
from weft.ir.types import dtypes
from weft.passes import Pass, Phase, Pipeline, Trace, parse_pipeline
from weft.passes.core import base
from weft.passes.library.cleanup.cast import CastDtype
from weft.passes.library.cleanup.cse import Cse
from weft.passes.library.cleanup.dce import Dce
from weft.passes.library.cleanup.fold_constants import FoldConstants


@pytest.fixture(autouse=True)
def sample() -> Iterator[type[Pass]]:
    """A pass with an argument of every type, registered for one test."""

    @dataclass(frozen=True)
    class Sample(Pass):
        name = "sample"
        effect = "exact"
        heads: int
        ratio: float = 0.5
        deep: bool = False
        text: str | None = None
        layers: tuple[int, ...] = ()
        method: Literal["mean", "svd"] = "mean"
        dtype: DType | None = None

        def run(self, graph: Graph, trace: Trace) -> None:
            return

    yield Sample
    base.PASSES.remove("sample")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("heads=4", {"heads": 4}),
        ("heads=-4, ratio=3", {"heads": -4, "ratio": 3.0}),
        ("heads=4, ratio=1e-3, deep=true", {"heads": 4, "ratio": 1e-3, "deep": True}),
        ('heads=4, text="a, {b}"', {"heads": 4, "text": "a, {b}"}),
        ("heads=4, text=notes-1.2/a.txt", {"heads": 4, "text": "notes-1.2/a.txt"}),
        ("heads=4, text=none, layers=[0, 2,5], method=svd", {"heads": 4, "layers": (0, 2, 5), "method": "svd"}),
        ("heads=4, dtype=f16", {"heads": 4, "dtype": dtypes.f16}),
        ("heads=4, dtype=float16", {"heads": 4, "dtype": dtypes.f16}),
    ],
)
def test_arguments_are_typed_and_print_back(sample: type[Pass], text: str, arguments: dict[str, object]) -> None:
    pipeline = parse_pipeline(f"dce, sample{{{text}}} , cse")
    assert pipeline.passes == (Dce(), sample(**arguments), Cse())
    assert type(pipeline.passes[1].ratio) is float  # type: ignore[attr-defined]  # a field of the sample
    assert parse_pipeline(str(pipeline)) == pipeline


def test_defaults_are_left_out_in_print() -> None:
    assert str(FoldConstants()) == "fold-constants"
    assert str(FoldConstants(limit=9)) == "fold-constants{limit=9}"
    assert str(CastDtype(dtypes.bf16)) == "cast{dtype=bf16}"


def test_phases_round_trip() -> None:
    pipeline = parse_pipeline("simplify: dce, cse; target: cast{dtype=f16}")
    assert pipeline == Pipeline((Phase("simplify", (Dce(), Cse())), Phase("target", (CastDtype(dtypes.f16),))))
    assert str(pipeline) == "simplify: dce, cse; target: cast{dtype=f16}"
    assert parse_pipeline(str(pipeline)) == pipeline
    assert parse_pipeline("") == Pipeline()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dce, pack-qvk", r"column 6: unknown pass 'pack-qvk'; did you mean pack-qkv"),
        ("xyzzy", r"column 1: unknown pass 'xyzzy'; see `weft passes`"),
        ("dce, sample", r"column 6: pass sample needs the argument heads \(int\)"),
        ("sample{head=3}", r"pass sample has no argument 'head'; it takes heads, ratio"),
        ("dce{x=1}", r"pass dce has no argument 'x'; it takes none"),
        ("sample{heads=four}", r'pass sample: heads="four" is not of type int'),
        ("sample{heads=true}", r"pass sample: heads=true is not of type int"),
        ("sample{heads=1.5}", r"heads=1.5 is not of type int"),
        ("sample{heads=1, method=median}", r'method="median" must be one of mean, svd'),
        ("sample{heads=1, layers=[a]}", r"is not of type \[int\]"),
        ("cast{dtype=f17}", r"pass cast: unknown dtype 'f17'"),
        ("sample{heads 4}", r"column 14: expected = but found '4'"),
        ("sample{heads=4", r"column 15: expected , or } but found the end"),
        ("sample{heads=4, heads=5}", r"column 17: argument 'heads' is given twice"),
        ("dce cse", r"column 5: expected , or ; but found 'cse'"),
        ("dce,", r"column 5: expected a pass after the comma"),
        ("dce, ?", r"column 6: unexpected character '\?'"),
        ("default", r"column 1: 'default' has no meaning here"),
        ("dce, -cse", r"column 7: there is no earlier pass 'cse' to remove"),
        ("sample{heads=1, ratio=1e400}", r"column 23: 1e400 cannot be read: the number is too large"),
        ('sample{heads=1, text="\\q"}', r'column 22: "\\q" cannot be read: Invalid'),
        (f"sample{{heads={'9' * 5000}}}", r"column 14: 9{20} cannot be read: Exceeds the limit"),
        ("sample{heads=[[1]]}", r"column 15: expected number or string or name but found '\['"),
        ("sample{heads=}", r"column 14: expected number or string or name"),
    ],
)
def test_syntax_errors_have_a_column(text: str, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        parse_pipeline(text)
