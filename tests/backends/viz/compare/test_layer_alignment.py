"""Alignment of the layers of two networks."""

from __future__ import annotations

from weft.backends.viz.compare.layer_alignment import find_layer_scope, match_layers
from weft.backends.viz.compare.networks import compare_networks
from weft.backends.viz.model.marks import CHANGED, NEW, REMOVED
from weft.backends.viz.model.network import Network, Vertex, build_network
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


def stack(stem: str, *ops: str) -> Network:
    """Return a network with one operation per layer."""
    vertices = tuple(Vertex(f"{stem}.{i}.v", op, f"{stem}.{i}", (), (f"{stem}.{i}.v",)) for i, op in enumerate(ops))
    return Network("net", vertices, {}, {})


def test_alignment_maximizes_common_operations_in_order() -> None:
    before, after = stack("layers", "a", "b", "c", "d"), stack("layers", "a", "c", "d", "e", "f")
    assert match_layers(before, after) == {
        "layers.0": "layers.0", "layers.1": "", "layers.2": "layers.1", "layers.3": "layers.2"
    }  # fmt: skip


def test_layers_of_equal_lists_with_other_names_correspond_by_position() -> None:
    assert match_layers(stack("h", "a", "b"), stack("layers", "b", "a")) == {"h.0": "layers.0", "h.1": "layers.1"}
    assert match_layers(stack("layers", "a", "b"), stack("layers", "b", "a")) == {}  # names correspond already
    assert match_layers(stack("layers", "a"), Network("none", (), {}, {})) == {}


def test_layer_scope_ends_at_the_first_number() -> None:
    assert find_layer_scope("encoder.layers.3.attn.0") == "encoder.layers.3"
    assert find_layer_scope("layers.12") == "layers.12"
    assert find_layer_scope("final_norm") == find_layer_scope("layer2.x") == ""
