"""The pass `legalize`, and names for Python: what is asked for in vain is refused by name."""

from __future__ import annotations

import pytest

from weft.ir import WeftError
from weft.passes import run_passes

from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        ("legalize{target=nope}", "unknown target 'nope'"),
        ("legalize{target=onnx, form=step}", "target onnx has only one form of a graph, not 'step'"),
        ("legalize{target=torch, form=stap}", "target torch has only one form of a graph, not 'stap'"),
        ('python-names{usual=["embed"]}', 'usual="embed" must have the form'),
    ],
)
def test_unknown_targets_and_forms_are_refused(passes: str, words: str) -> None:
    with pytest.raises(WeftError, match=words):
        run_passes(ZOO["variant/grouped"](), passes)
