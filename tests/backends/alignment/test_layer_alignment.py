"""Alignment of the layers of two models."""

from __future__ import annotations

from collections import Counter

from weft.backends.alignment.layer_alignment import align_sequences, find_layer, match_layers


def stack(stem: str, *contents: str) -> dict[str, Counter[str]]:
    return {f"{stem}.{i}": Counter([text]) for i, text in enumerate(contents)}


def test_alignment_maximizes_common_contents_in_order() -> None:
    before, after = stack("layers", "a", "b", "c", "d"), stack("layers", "a", "c", "d", "e", "f")
    assert match_layers(before, after) == {
        "layers.0": "layers.0", "layers.1": "", "layers.2": "layers.1", "layers.3": "layers.2"
    }  # fmt: skip


def test_layers_of_equal_lists_with_other_names_correspond_by_position() -> None:
    assert match_layers(stack("h", "a", "b"), stack("layers", "b", "a")) == {"h.0": "layers.0", "h.1": "layers.1"}
    assert match_layers(stack("layers", "a", "b"), stack("layers", "b", "a")) == {}  # names correspond already
    assert match_layers(stack("layers", "a"), {}) == {}


def test_sequences_are_aligned_by_scores() -> None:
    assert align_sequences([[0.1, 0.9, 0.0], [0.0, 0.8, 0.7]]) == [(0, 1), (1, 2)]
    assert align_sequences([]) == []


def test_a_layer_ends_at_the_first_number() -> None:
    assert find_layer("encoder.layers.3.attn.0") == "encoder.layers.3"
    assert find_layer("layers.12") == "layers.12"
    assert find_layer("final_norm") == find_layer("layer2.x") == ""
