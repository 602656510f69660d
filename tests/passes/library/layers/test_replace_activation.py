"""replace-activation: the activation of all feed-forwards is replaced."""

from __future__ import annotations

import dataclasses

import pytest

from weft.frontends.dsl import MLP, Attention, Block, Decoder, GatedMLP, MoE
from weft.ir import WeftError, ops
from weft.ir.ops.activation import ACTIVATIONS
from weft.passes import lookup, run_passes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck

from ...models import applied, count, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("to", [*ACTIVATIONS, "identity", "swish(0.7)"])
def test_equals_the_model_built_with_the_other_activation(to: str) -> None:
    """Of plain and gated feed-forwards and of experts, whose weights are drawn alike."""
    for feed in (MLP(7, "gelu", bias=True), GatedMLP(7, "silu", limit=1.2), MoE(4, 7, 2, "relu", gated=False)):
        before, wanted = (
            Decoder(37, 18, 2, Block(Attention(3), dataclasses.replace(feed, activation=name))).graph()
            for name in (feed.activation, to)
        )
        after = run_passes(before, f'replace-activation{{to="{to}"}}', verify=True)
        assert worst(wanted, after) <= EXACT
        assert to == feed.activation or worst(before, after) > 1e-4


def test_the_check_notices_another_activation() -> None:
    before = ZOO["packed/preset mixtral-8x7b"]()
    gelu, tanh = (applied(f"replace-activation{{to={name}}}", before) for name in ("gelu", "gelu_tanh"))
    lookup("replace-activation").make({"to": "gelu"}).check(before, gelu, EquivalenceCheck())
    with pytest.raises(WeftError, match="output logits differs"):
        lookup("replace-activation").make({"to": "gelu"}).check(before, tanh, EquivalenceCheck())


def test_gates_of_attention_and_poolers_stay() -> None:
    after = applied("replace-activation{to=relu}", ZOO["variant/gate"]())
    assert (
        count(after, "sigmoid") == 2 and [n.attrs["activation"] for n in after.nodes if n.op is ops.glu] == ["relu"] * 2
    )
    after = applied("replace-activation{to=relu}", ZOO["family/bert"]())
    assert count(after, "tanh") == 1 and count(after, "relu") == 3
    with pytest.raises(WeftError, match="unknown activation 'rellu'"):
        applied("replace-activation{to=rellu}", after)
