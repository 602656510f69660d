"""permute-neurons: hidden features of feed-forwards in another order."""

from __future__ import annotations

import pytest

from weft.ir import ops
from weft.ir.recipes import Shuffle
from weft.passes import Trace
from weft.passes.core.equivalence import EXACT

from ...gated import UNITS, unit
from ...models import applied, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize(
    "name", ["family/gpt2-untied", "family/gpt-oss", "packed/family bert", "packed/variant repeated", "family/mixtral"]
)
def test_permuted_model_keeps_outputs(name: str) -> None:
    before = ZOO[name]()
    after = applied("permute-neurons{seed=3}", before)
    assert any(isinstance(p.recipe, Shuffle) for p in after.params.values()) and worst(before, after) <= EXACT
    assert str(applied("permute-neurons{seed=3}", after)) == str(after)
    other = applied("permute-neurons{seed=4}", after)
    assert str(other) != str(after) and worst(before, other) <= EXACT


def test_permuting_one_side_only_changes_outputs() -> None:
    before = ZOO["family/gpt2-untied"]()
    wrong = applied("permute-neurons", before)
    for name, p in wrong.params.items():
        if name.endswith("down.weight"):
            p.recipe = before.params[name].recipe
    assert worst(before, wrong) > 0.05


def test_all_weights_of_a_feed_forward_are_permuted_together() -> None:
    """Also where another pass has changed one of them since."""
    before = applied("permute-neurons, fold-norm-scale", ZOO["packed/variant tied"]())
    assert worst(before, applied("permute-neurons", before)) <= EXACT


def test_weights_with_another_reader_keep_their_order() -> None:
    before = unit(UNITS["silu"])
    before.add_output("other", ops.linear(before.inputs["z"], before.params["up"]))
    trace = Trace()
    assert str(applied("permute-neurons", before, trace)) == str(before)
    assert trace.refusals[0].reason == "its weights are also read by linear (%linear_4)"
