"""The tree of parts: scopes as groups, equal layers folded into repeats."""

from __future__ import annotations

import random

import pytest

from weft.backends.viz.model.network import Network, Vertex, Weight
from weft.backends.viz.model.outline import PicturePart, _find_repetitions, build_outline, find_layer_io, hash_structure


def find_by_trial(prints: list[str]) -> list[tuple[int, int]]:
    found = []
    for i in range(len(prints)):
        length, period = 1, 1
        for p in range(1, (len(prints) - i) // 2 + 1):
            end = i + p
            while end + p <= len(prints) and prints[end : end + p] == prints[i : i + p]:
                end += p
            if end - i > max(p, length):
                length, period = end - i, p
        found.append((length, period))
    return found


@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_repetitions_equal_those_of_trying_every_period(kinds: int) -> None:
    rng = random.Random(kinds)
    for length in range(30):
        prints = [str(rng.randrange(kinds)) for _ in range(length)]
        assert _find_repetitions(prints) == find_by_trial(prints)


def test_repetitions_of_thousands_of_layers_are_found_quickly() -> None:
    """Trying every period at every place would take hours."""
    prints = [str(i * i % 4093 % 7) for i in range(4000)]
    assert len(_find_repetitions(prints)) == 4000


def chain(*names: str) -> Network:
    """Return operations that read one another in order; the scope of each is its name without the last component."""
    vertices, value = [], "x"
    for name in names:
        vertices.append(Vertex(name, "relu", name.rpartition(".")[0], (value,), (name,), ("x",), ("f32[n]",)))
        value = name
    return Network("net", tuple(vertices), {"x": "f32[n]"}, {"y": (value, "f32[n]")})


def describe(part: PicturePart) -> list[tuple[str, int]]:
    return [(p.path, p.count) for p in part.parts() if p.children and p.path]


def test_scopes_are_groups_and_equal_layers_fold() -> None:
    root = build_outline(chain("embed", *(f"layers.{i}.{v}" for i in range(3) for v in ("attn.q", "attn.o", "ffn"))))
    assert [part.path for part in root.children] == ["x", "embed", "layers.0-2", "out.y"]
    assert describe(root) == [("layers.0-2", 3), ("layers.0", 1), ("layers.0.attn", 1)]
    (repeat,) = (part for part in root.children if part.count > 1)
    assert repeat.times == " × 3" and not repeat.parallel and repeat.body is repeat.children[0]
    assert len(list(repeat.all_vertices())) == 9 and len(repeat.later_rounds) == 2
    assert [*repeat.read] == ["embed"]


def test_layer_of_another_structure_is_not_folded() -> None:
    names = [f"layers.{i}.{v}" for i in range(4) for v in ("a", "b", *(["c"] if i == 1 else []))]
    assert describe(build_outline(chain(*names))) == [
        ("layers.0", 1), ("layers.1", 1), ("layers.2-3", 2), ("layers.2", 1)
    ]  # fmt: skip


def test_period_of_several_layers_folds() -> None:
    names = [f"layers.{i}.{v}" for i in range(6) for v in ("a", "b", *(["c"] if i % 3 == 2 else []))]
    root = build_outline(chain(*names))
    assert [(p.path, p.count) for p in root.children if p.children] == [("layers.0-5", 2)]


def test_biases_and_views_join_the_operation_before_them() -> None:
    weight = Weight("b", "[4]", "f32", 16, "")
    vertices = (
        Vertex("q", "linear", "", ("x",), ("q",), weights=(weight,)),
        Vertex("q_bias", "add", "", ("q",), ("q_bias",), weights=(weight,)),
        Vertex("q_heads", "reshape", "", ("q_bias",), ("q_heads",), view=True),
        Vertex("other", "relu", "", ("q_heads",), ("other",)),
    )
    root = build_outline(Network("net", vertices, {"x": ""}, {"y": ("other", "")}))
    assert [[v.name for v in part.vertices] for part in root.children] == [
        ["x"], ["q", "q_bias", "q_heads"], ["other"], ["out.y"]
    ]  # fmt: skip


def test_caches_belong_to_their_layer() -> None:
    vertices = tuple(
        Vertex(f"layers.{i}.a", "relu", f"layers.{i}", (f"past.{i}.key", "mask"), (f"layers.{i}.a",)) for i in range(2)
    )
    inputs = dict.fromkeys(("mask", "past.0.key", "past.1.key"), "")
    outputs = {f"present.{i}.key": (f"layers.{i}.a", "") for i in range(2)} | {"y": ("layers.1.a", "")}
    network = Network("net", vertices, inputs, outputs)
    assert find_layer_io(network) == (
        {"past.0.key": None, "past.1.key": None}, {f"layers.{i}.a": [f"present.{i}.key"] for i in range(2)}
    )  # fmt: skip
    root = build_outline(network)
    assert "past.0.key" not in {part.path for part in root.children}
    first = next(part for part in root.parts() if part.vertices and part.vertices[0].name == "layers.0.a")
    assert (first.layer_inputs, first.layer_outputs) == (("past.0.key",), ("present.0.key",))


def test_scopes_that_read_each_other_are_regrouped() -> None:
    root = build_outline(chain("a.u", "b.v", "a.w", "b.z"))
    order = [v.name for part in root.children for v in part.all_vertices()]
    assert sorted(order) == sorted(["x", "a.u", "b.v", "a.w", "b.z", "out.y"])
    made: set[str] = set()
    for part in root.children:  # no part reads what a later one produces
        assert {*part.read} <= made
        made |= {*part.results}


def test_structure_hash_ignores_names_and_named_sizes() -> None:
    def part(layer: int, attrs: dict[str, str], kind: str = "f32[batch, 4]") -> PicturePart:
        scope = f"layers.{layer}"
        vertex = Vertex(f"{scope}.v", "relu", scope, (f"in{layer}",), (f"{scope}.v",), ("x",), (kind,), attrs)
        return PicturePart("v", f"{scope}.v", (vertex,))

    def print_of(layer: int, attrs: dict[str, str], kind: str = "f32[batch, 4]") -> str:
        return hash_structure(PicturePart(str(layer), f"layers.{layer}", children=[part(layer, attrs, kind)]))

    assert print_of(0, {}) == print_of(7, {}) == print_of(0, {}, "f32[n, 4]")
    assert print_of(0, {}) != print_of(0, {"window": "3"}) and print_of(0, {}) != print_of(0, {}, "f32[n, 5]")
