"""Noisy routers without their noise."""

from __future__ import annotations

import numpy as np
import pytest

from weft import Attention, Block, Decoder, MoE, Router
from weft.ir import WeftError, verify
from weft.passes import default_pipeline, run_passes

from ...models import Tiny
from ...rewrites import Rewrite, rewrites

MODEL = Decoder(20, 8, 2, Block(Attention(2), MoE(4, 6, 2, router=Router(noisy=True))))


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


def test_routers_lose_their_noise() -> None:
    before = MODEL.graph()
    after = run_passes(before, "quiet-routers", verify=True)
    verify(after, recipes=True)
    assert list(before.inputs) == ["input_ids", "router_noise.0", "router_noise.1"]
    assert list(after.inputs) == ["input_ids"]
    assert not [n for n in after.params if "noise" in n]
    assert after == Decoder(20, 8, 2, Block(Attention(2), MoE(4, 6, 2))).graph()


def test_compiling_removes_router_noise(rng: np.random.Generator) -> None:
    assert default_pipeline(MODEL.graph()).passes[0].name == "quiet-routers"
    assert "quiet-routers" not in str(default_pipeline(Tiny().graph()))
    run_passes(MODEL.graph(), verify=True)


def test_there_must_be_noise() -> None:
    with pytest.raises(WeftError, match=r"quiet-routers: graph decoder has no input router_noise\.0"):
        run_passes(Decoder(20, 8, 1, Block(Attention(2))).graph(), "quiet-routers")
