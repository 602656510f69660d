"""Degrees of parallelism: their text form, and models that they cannot divide."""

from __future__ import annotations

import re

import pytest

from weft.backends.torch.transformers.scale.split import Split, check_split, list_mixtures
from weft.ir import WeftError

from ..tiny import base_of, plans_of


def test_missing_degrees_are_one() -> None:
    assert Split.parse("tp=8, ep=4,pp=2") == Split(8, 4, 2, 1)
    assert Split.parse("pp=2,microbatches=8") == Split(1, 1, 2, 8)


@pytest.mark.parametrize(("split", "devices"), [(Split(), 1), (Split(4, 2, 3), 12), (Split(2, 8, 1, 16), 8)])
def test_experts_share_the_devices_of_tensor_parallelism(split: Split, devices: int) -> None:
    assert split.devices == devices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=2", "--parallel 'dp' is unknown: choose among tp, ep, pp, microbatches, such as tp=8,ep=8,pp=2"),
        ("", "--parallel '' is unknown"),
        ("tp=0", "--parallel 'tp=0': tp takes a whole number from 1"),
        ("tp=²", "--parallel 'tp=²': tp takes a whole number from 1"),
        ("tp=1000001", "tp takes a whole number from 1"),
        ("tp=2,tp=2", "--parallel gives tp twice; give it once"),
    ],
)
def test_invalid_degrees_are_refused(text: str, message: str) -> None:
    with pytest.raises(WeftError, match=re.escape(message)):
        Split.parse(text)


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("dense", Split(tp=3), "tp=3 cannot share the 4 key/value heads of layers.*.attn in dense evenly; tp must"),
        ("dense", Split(ep=2), "ep=2 divides experts, but dense has none: leave ep out"),
        ("experts", Split(ep=3), "ep=3 cannot share the 8 experts of layers.*.ffn.experts in experts evenly"),
        ("experts", Split(tp=4, ep=2), "ep=2 is not a multiple of tp=4: choose ep=4 or a multiple of it"),
        ("dense", Split(pp=4), "pp=4 is more than the 3 layers of dense: each stage needs one"),
        ("mamba", Split(tp=2), "tp=2 cannot divide any part of mamba: it has no attention"),
    ],
)  # fmt: skip
def test_parts_that_cannot_be_divided_are_named(name: str, split: Split, message: str) -> None:
    with pytest.raises(WeftError, match=re.escape(message)):
        check_split(split, base_of(name), plans_of(name))


def test_even_splits_are_accepted() -> None:
    check_split(Split(tp=4, pp=3), base_of("dense"), plans_of("dense"))
    check_split(Split(tp=2, ep=8), base_of("experts"), plans_of("experts"))


def test_mixtures_are_listed_with_experts_and_hidden_width() -> None:
    lowered = base_of("experts").lowered
    assert list(list_mixtures(lowered.graph)) == [(8, 16, f"layers.{i}.ffn.experts") for i in range(2)]
    assert list(list_mixtures(base_of("dense").lowered.graph)) == []
