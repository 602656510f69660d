"""Pipeline stages: layers, weights and nodes of each."""

from __future__ import annotations

from weft.backends.torch.transformers.scale.stages import Stages

from ..tiny import base_of


def stages_of(name: str, count: int) -> Stages:
    base = base_of(name)
    return Stages(base.lowered, base, count)


def test_first_stages_have_the_layers_left_over() -> None:
    stages = stages_of("dense", 2)
    assert [stages.get_layers(s) for s in range(2)] == [range(2), range(2, 3)]
    assert [len(stages_of("dense", 3).get_layers(s)) for s in range(3)] == [1, 1, 1]


def test_modules_are_in_the_stage_of_their_layer() -> None:
    stages = stages_of("dense", 2)
    paths = {"embed_tokens": 0, "layers.1.attn": 0, "layers.2": 1, "layers.2.ffn.up": 1, "norm": 1}
    assert {path: stages.find_stage(path) for path in paths} == paths


def test_tied_table_is_stored_in_the_first_and_last_stage() -> None:
    tied, dense = stages_of("tied", 2), stages_of("dense", 2)
    assert tied.list_stages("model.embed_tokens.weight") == [0, 1]
    assert dense.list_stages("model.embed_tokens.weight") == [0]
    assert dense.list_stages("lm_head.weight") == [1]
    assert dense.list_stages("model.layers.1.attn.q.weight") == [0]


def test_nodes_between_layers_follow_the_layer_before() -> None:
    stages = stages_of("dense", 3)
    places = stages.map_nodes()
    assert list(places.values()) == sorted(places.values())
    for node, stage in places.items():
        if node.scope.startswith("layers."):
            assert stage == int(node.scope.split(".")[1])
    first, last = next(iter(places)), list(places)[-1]
    assert (first.op.name, places[first], last.op.name, places[last]) == ("embedding", 0, "linear", 2)
