"""What two models have and cost: the numbers of `weft inspect --json` before and after passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft import load_source, run_passes
from weft.backends.viz.compare import compare
from weft.backends.viz.diff import data, sheet
from weft.backends.viz.network import network
from weft.backends.viz.totals import Totals, totals
from weft.frontends.inspection import inspect, usual_tokens
from weft.frontends.sources import Model

PIPELINES = {
    "smollm2-135m": "mha-to-gqa{kv_heads=1}, fuse-norm-linear, kv-cache",
    "gpt2": "default",
    "mistral-7b": "default",
    "mamba-130m": "cast{dtype=f16}, dce",
    "switch-base-8": "pack-qkv",
    "deepseek-v3": "prune-layers{layers=[0, 30]}",
}


def after(preset: str) -> tuple[Model, Model]:
    model = load_source(preset)
    return model, replace(model, graph=run_passes(model.graph, PIPELINES[preset]))


def stored(model: Model) -> int:
    """Bytes of all parameters, one by one."""
    return sum(int(p.type.elements) * p.type.dtype.bits // 8 for p in model.graph.params.values())


@pytest.mark.parametrize("preset", PIPELINES)
def test_totals_are_what_inspect_tells(preset: str) -> None:
    for model in after(preset):
        tokens = usual_tokens(model.graph)
        found, told = totals(network(model.graph), tokens), inspect(model).json()
        assert told["tokens"] == tokens == found.tokens
        assert (found.parameters, found.flops) == (told["parameters"], told["flops_prefill"])
        assert found.operations == len(model.graph) and found.weights == stored(model)
        if told["kind"] == "decoder":
            assert found.cache == (told["cache_per_token_bytes"] or {"f16": 0})["f16"]
            assert found.state == told["state_bytes"]["f16"]


def test_the_sheet_tells_what_was_and_is() -> None:
    model, smaller = after("smollm2-135m")
    networks = network(model.graph), network(smaller.graph)
    found = compare(*networks)
    before, then = (totals(n, 512) for n in networks)
    rows = dict(sheet(found, before, then).rows)
    was, now = len(model.graph), len(smaller.graph)
    assert rows["Operations"] == f"{was}, then {now} (−{was - now})"
    assert rows["KV cache a token"] == "22.5 KiB, then 7.5 KiB (−15.0 KiB)"
    assert "State of a text" not in rows
    assert data(found, before, then)["operations"] == [was, now]
    counts = data(found, before, then)["counts"]
    assert counts["kept"] + counts["changed"] + counts["removed"] == was
    assert counts["kept"] + counts["changed"] + counts["new"] == now


def test_numbers_that_stay_are_told_once() -> None:
    same = Totals(3, 12, 99, 8, 0, 48, 512)
    one = network(load_source("smollm2-135m").graph)
    rows = dict(sheet(compare(one, one), same, same).rows)
    assert rows == {
        "Operations": "3",
        "Parameters": "12",
        "FLOPs, 512 tokens": "99",
        "KV cache a token": "8 B",
        "Weights": "48 B",
    }
