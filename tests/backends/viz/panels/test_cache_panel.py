"""Cache sizes of a model and its variants, compared with formulas by hand and the runtime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import weft
from weft import (
    MLA,
    Attention,
    Block,
    Decoder,
    GatedMLP,
    LightningIndex,
    RMSNorm,
    RoPE,
    load_source,
)
from weft.frontends.app.api.inspect.counting import inspect

from ..pages import model_of
from .graphs import count_cached, panels_of


def test_variants_have_the_cache_of_their_heads() -> None:
    found = panels_of(model_of("llama3.1-8b").graph)["caches"]
    assert count_cached(found, "this model", 1000) == 32 * 1000 * 2 * 8 * 128
    assert count_cached(found, "multi-head", 1000) == 32 * 1000 * 2 * 32 * 128
    assert count_cached(found, "multi-query", 1000) == 32 * 1000 * 2 * 128
    assert count_cached(found, "latent", 1000) == 32 * 1000 * (4 * 128 + 64)
    assert count_cached(found, "window", 100_000) == 32 * 4096 * 2 * 8 * 128
    assert found["same"] == "grouped-query" and "grouped-query" not in [v["name"] for v in found["variants"]]
    latent = panels_of(model_of("deepseek-v3").graph)["caches"]
    assert count_cached(latent, "this model", 7) == 61 * 7 * 576
    assert count_cached(latent, "multi-head", 7) == 61 * 7 * 128 * (
        192 + 128
    )  # DeepSeek-V3: keys of 192, values of 128
    banded = panels_of(model_of("gpt3-175b").graph)["caches"]
    assert count_cached(banded, "no window", 2048) == 96 * 2048 * 2 * 12_288 and banded["same"] == "multi-head"


LATENT = MLA(4, 24, 8, 8, 8, RoPE(10_000))


CHOOSING = replace(LATENT, index=LightningIndex(2, 10, top_k=5))


MIXERS = {
    "full": Attention(4, 2, rope=RoPE()),
    "window": Attention(4, 2, window=16),
    "latent": LATENT,
    "chosen": CHOOSING,
}


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_cache_of_the_model_equals_the_allocation_of_the_runtime(tmp_path: Path, mixer: Any) -> None:
    made = Decoder(vocab=64, dim=64, layers=2, block=Block(mixer, GatedMLP(48), norm=RMSNorm(1e-6)), context=128)
    weft.compile(made, tmp_path / "out")
    allocated = weft.load(tmp_path / "out").decoder.cache_bytes(1, 128)
    assert 4 * count_cached(panels_of(load_source(made).graph)["caches"], "this model", 128) == allocated


def test_lightning_index_adds_its_keys() -> None:
    made = load_source(Decoder(64, 32, 2, Block(CHOOSING, GatedMLP(48)), context=128))
    found = panels_of(made.graph)
    (kind,) = found["attention"]["kinds"]
    assert (
        "Of these, each token chooses the 5 with the largest scores of an index (DeepSeek-V3.2)." in kind["sentences"]
    )
    assert count_cached(found["caches"], "this model", 100) == 2 * 100 * (24 + 8 + 10)
    assert count_cached(found["caches"], "multi-query", 100) == 2 * 100 * (8 + 8 + 8 + 10)
    assert inspect(made).cache_per_token == 2 * (24 + 8 + 10)


def test_recurrent_states_equal_weft_inspect() -> None:
    found = panels_of(model_of("mamba-130m").graph)
    state = inspect(model_of("mamba-130m")).state_bytes
    numbers, rest = found["caches"]["state"]
    assert state == {"f32": 4 * numbers + rest, "f16": 2 * numbers + rest}
    assert set(found) == {"caches"}
