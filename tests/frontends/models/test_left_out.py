"""Parts of a source that its graph leaves out: modules of tensors, keys, and which must be accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.frontends.models.config_keys import Unread
from weft.frontends.models.left_out import (
    LeftOut,
    check_accepted,
    explain_tensor,
    find_unread_entries,
    find_unread_modules,
    find_unread_settings,
    summarize,
)
from weft.ir import WeftError
from weft.ir.storage.documents import Record


def test_modules_are_outermost_and_layers_are_numbered() -> None:
    read = ["model.layers.0.q.weight"]
    unread = ["model.layers.0.k.weight", "model.layers.1.k.weight", "model.layers.0.k.bias", "vision.a.w", "vision.b.w"]
    found = {part.name: part.detail for part in find_unread_modules(unread, read)}
    assert found["vision"] == "vision.a.w, vision.b.w"
    assert found["model.layers.{i}.k"] == "model.layers.0.k.weight, model.layers.0.k.bias"
    assert [part.detail for part in find_unread_modules(["bias"], [])] == [""]


@pytest.mark.parametrize(("count", "text"), [(1, "k0"), (2, "k0, k1"), (5, "k0, k1 and 3 more")])
def test_summaries_have_two_names(count: int, text: str) -> None:
    assert summarize([f"k{i}" for i in range(count)]) == text


def test_keys_show_their_values_and_overrides() -> None:
    parts = list(find_unread_settings([Unread("a.b", 3), Unread("c", "x" * 99, "d=1")]))
    assert [(part.name, part.detail) for part in parts] == [("a.b", "3"), ("c", "'" + "x" * 59 + ", overridden by d=1")]
    entries = find_unread_entries({"known": 1, "null": None, "magic": 2}, ["known"], "f.json")
    assert [str(part) for part in entries] == ["key f.json:magic (2)"]


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("model.rotary_emb.inv_freq", "a buffer that the graph computes"),
        ("lm_head.weight", "a copy of the embedding"),
        ("model.layers.61.mlp.weight", "of further layers, which predict several tokens ahead"),
        ("qa_outputs.weight", "of another head"),
    ],
)
def test_unused_tensors_have_a_reason(key: str, reason: str) -> None:
    assert explain_tensor(key) == reason


def test_parts_that_change_outputs_must_be_named() -> None:
    parts = [LeftOut("head", "score", changes=True), LeftOut("key", "magic")]
    with pytest.raises(
        WeftError, match=r"^m: leaving out head score would change the model's outputs; accept it by --without"
    ):
        check_accepted("m", parts, [])
    assert check_accepted("m", parts, ["score"]) == [parts[1]]
    with pytest.raises(WeftError, match="m has no part 'other' to leave out; parts left out: magic, score"):
        check_accepted("m", parts, ["other"])


def test_records_are_read_again() -> None:
    part = LeftOut("head", "score", "detail", changes=True)
    assert LeftOut.read(Record(Path("f"), part.record())) == part
