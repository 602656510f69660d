"""The default pipeline of each kind of model, and named pipelines."""

from __future__ import annotations

import pytest

from weft.ir import TensorType, ops, parse, print_graph
from weft.ir.types import dtypes
from weft.passes import default_pipeline, parse_pipeline, run_passes
from weft.passes.core.pipeline import PIPELINES
from weft.passes.default import FUSE_DECODE

from .models import BATCH, SEQ, Tiny, count


def test_decode_pipeline_parses_by_name() -> None:
    simplify, fuse = str(PIPELINES["decode-torch"]).split("; ")
    assert simplify == "simplify: unfuse-residual-norm, dce, cse, fold-constants" and fuse.startswith("fuse-decode: ")
    assert parse_pipeline("decode-torch, -pack-linears").passes[-1] == FUSE_DECODE.passes[-1]
    assert "pack-linears" not in str(parse_pipeline("decode-torch, -pack-linears"))


def test_default_expands_and_removal_drops_passes() -> None:
    full = default_pipeline(Tiny().graph())
    assert parse_pipeline("default", full) == full
    names = [p.name for p in parse_pipeline("dce, default, -last-token-logits,-dce, cast{dtype=f16}", full).passes]
    assert names == [*(p.name for p in full.passes if p.name not in ("dce", "last-token-logits")), "cast"]
    assert full == default_pipeline(Tiny().graph())


def test_default_pipeline_caches_decoders_only() -> None:
    decoder = Tiny().graph()
    encoder = decoder.clone()
    encoder.meta["kind"] = "encoder"
    kv = {"kv-cache", "last-token-logits"}
    names = [p.name for p in default_pipeline(decoder).passes]
    simplify, fuse = ["dce", "cse", "fold-constants"], ["pack-qkv", "pack-gate-up", "fuse-residual-norm"]
    assert names == [*simplify, *fuse, "kv-cache", "last-token-logits"]
    assert [p.name for p in default_pipeline(encoder).passes] == [n for n in names if n not in kv]
    half = run_passes(decoder, "kv-cache")
    assert [p.name for p in default_pipeline(half).passes] == [n for n in names if n != "kv-cache"]
    whole = run_passes(half)  # a graph that has what a pass brings is not refused
    assert [p.name for p in default_pipeline(whole).passes] == [*simplify, *fuse]
    assert print_graph(run_passes(whole)) == print_graph(whole)


@pytest.mark.parametrize(
    "tiny",
    [Tiny(), Tiny(layers=1, norm="layer", rope=False, alibi=True, bias="q up"), Tiny(layers=1, tied=True, window=2)],
)
def test_the_default_pipeline_verifies(tiny: Tiny) -> None:
    after = run_passes(tiny.graph(), "default, cast{dtype=bf16}", verify=True)
    assert parse(str(after)) == after


def test_the_default_pipeline_of_an_encoder() -> None:
    g = Tiny(rope=False).graph()
    g.meta["kind"] = "encoder"
    mask = g.add_input("attention_mask", TensorType(dtypes.i64, (BATCH, SEQ)))
    for node in list(g.nodes):
        if node.op is ops.attention:
            with g.inserting(before=node):
                y = ops.attention(*node.inputs[:3], None, mask, **{**node.attrs, "causal": False})
            g.replace(node, y)
    after = run_passes(g, verify=True)
    assert list(after.inputs) == ["input_ids", "attention_mask"]
    assert count(after, "linear") == 9 and count(after, "add_norm") == 4
