"""Settings of a decoder inferred from its graph."""

from __future__ import annotations

import pytest

from weft.frontends.dsl import RMSNorm
from weft.frontends.dsl.blocks import ARRANGEMENTS
from weft.frontends.export.infer_settings import infer_settings
from weft.passes.forms import canonicalize

from .graphs import decoder


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arrangement_is_inferred(arrangement: str) -> None:
    assert infer_settings(canonicalize(decoder(block={"arrangement": arrangement}))).arrangement == arrangement


def test_settings_are_inferred() -> None:
    graph = decoder(attention={"window": 5, "softcap": 3.0, "qk_norm": RMSNorm()}, block={"arrangement": "sandwich"})
    found = infer_settings(canonicalize(graph))
    assert (found.window, found.softcap, found.qk_norm, found.arrangement) == (5, 3.0, "head", "sandwich")
    assert (found.heads, found.kv_heads, found.head_dim, found.ffn, found.dim) == (4, 2, 4, 24, 16)
