"""prune-neurons and permute-neurons: hidden features go, or exchange their places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import weft
from weft.ir import Graph, WeftError, interpret, ops
from weft.ir.recipes import Literal, Shuffle
from weft.passes import Trace, run_passes
from weft.passes.core.equivalence import EXACT

from ...gated import UNITS, unit
from ...models import applied, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO

ATTENTION = weft.Attention(4, rope=weft.RoPE())
FEED_FORWARDS = {"gated": weft.GatedMLP(24), "biased": weft.MLP(24, "gelu", bias=True)}
IDS = np.random.default_rng(0).integers(0, 53, (4, 16))


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


def build(name: str = "gated") -> Graph:
    return weft.Decoder(53, 16, 2, weft.Block(ATTENTION, FEED_FORWARDS[name], weft.RMSNorm()), context=64).graph()


def logits(graph: Graph) -> np.ndarray:
    at = np.broadcast_to(np.arange(IDS.shape[1]), IDS.shape)
    return interpret(graph, {name: IDS if name == "input_ids" else at for name in graph.inputs})["logits"]


@pytest.mark.parametrize("name", FEED_FORWARDS)
def test_features_that_nothing_reads_are_removed_without_loss(name: str) -> None:
    graph = build(name)
    for param in graph.params.values():
        if param.name.endswith("down.weight"):
            read = np.random.default_rng(1).permutation(24) < 12
            param.recipe = Literal.from_array(param.recipe.evaluate(graph.reader) * read)
    pruned = run_passes(graph, "prune-neurons{keep=0.5}")
    assert {p.shape for n, p in pruned.params.items() if n.endswith("down.weight")} == {(16, 12)}
    np.testing.assert_allclose(logits(pruned), logits(graph), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FEED_FORWARDS)
def test_a_calibration_refits_the_down_projection(name: str, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", IDS)
    graph = build(name)
    for param in graph.params.values():  # random weights of N(0, 0.02²) would make the feed-forwards too small to see
        if param.name.endswith(("up.weight", "gate.weight", "down.weight")):
            param.recipe = Literal.from_array(20 * param.recipe.evaluate(graph.reader))
    errors = []
    for calibration in ("", f', calibration="{tmp_path / "ids.npy"}"'):
        pruned = run_passes(graph, f"prune-neurons{{keep=0.75{calibration}}}")
        errors.append(np.linalg.norm(logits(pruned) - logits(graph)))
    assert errors[1] < 0.7 * errors[0]


def test_impossible_arguments_are_refused() -> None:
    for keep in (0, 1, 1.5):
        with pytest.raises(WeftError, match=f"keep={keep}.* must be between 0 and 1"):
            run_passes(build(), f"prune-neurons{{keep={keep}}}")


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
