"""Alignment of the layers of two networks."""

from __future__ import annotations

from weft.backends.viz.compare.networks import compare_networks
from weft.backends.viz.model.marks import CHANGED, NEW, REMOVED
from weft.backends.viz.model.network import build_network
from weft.passes import run_passes

from ..pages import model_of, network_of
from .marked import marked


def test_layers_after_a_pruned_layer_correspond() -> None:
    """The layers behind one that is pruned have other numbers, and are what they were."""
    model = model_of("smollm2-135m").graph
    found = compare_networks(build_network(model), build_network(run_passes(model, "prune-layers{layers=[5]}")))
    assert {name.split(".")[1] for name in marked(found.before, REMOVED)} == {"5"}
    assert found.pairs["layers.6.attn.q"] == "layers.5.attn.q"
    assert found.pairs["layers.4.attn.q"] == "layers.4.attn.q"
    readers = {v.name for v in found.after.vertices if v.mark and v.mark.sign == CHANGED}
    assert readers == {"layers.5.attn_norm", "layers.5.attn_residual"} and not marked(found.after, NEW)


def test_layers_of_different_models_correspond_by_position() -> None:
    small, large = (network_of(name) for name in ("smollm2-135m", "deepseek-v3"))
    found = compare_networks(small, large)
    assert all(a.split(".")[:2] == b.split(".")[:2] for a, b in found.pairs.items() if a.startswith("layers."))
    assert {a.split(".")[1] for a in found.pairs if a.startswith("layers.")} == {str(i) for i in range(30)}
    alone = {name for name in marked(found.after, NEW) if int(name.split(".")[1]) >= 30}
    assert len(alone) == sum(v.scope.startswith("layers.") and int(v.scope.split(".")[1]) >= 30 for v in large.vertices)
