"""drop-outputs and widen-outputs: outputs that a caller does not need, or needs in f32."""

from __future__ import annotations

import pytest

from weft.ir import parse
from weft.passes.library.target.outputs import list_losses

from ...rewrites import Rewrite, rewrites


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


def test_losses_are_outputs_of_a_language_model_other_than_logits_and_caches() -> None:
    text = (
        "graph g { TASK input %x: f32[n] output NAME = %x output present.0.key = %x "
        "output aux_loss = %x output z = %x }"
    )
    decoder = text.replace("NAME", "logits")
    assert list_losses(parse(decoder.replace("TASK", ""))) == ["aux_loss", "z"]
    assert list_losses(parse(decoder.replace("TASK", 'meta task = "classification"'))) == []
    assert list_losses(parse(text.replace("NAME", "last_hidden_state").replace("TASK", ""))) == []
