"""strip-positions: nothing tells places any more, and what is not taken out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft import (
    MLA,
    ALiBi,
    Attention,
    LayerNorm,
    LearnedPositions,
    LinearAttention,
    RelativeAttention,
    RMSNorm,
    Sinusoidal,
    T5Bias,
)
from weft.ir import Graph, TensorType, WeftError, ops, parse
from weft.ir.types import dtypes
from weft.passes import Trace, parse_pipeline, run_passes
from weft.passes.core.equivalence import EquivalenceCheck, measure_difference
from weft.passes.library.positions.strip_positions import find_first_row, find_position_tables, find_position_values

from ....sampling import by_turns
from ...models import BATCH, SEQ, Tiny, applied, weight
from ...positioned import ROPE, decoder, encoder, rotary
from ...rewrites import Rewrite, rewrites

POSITIONED: dict[str, Callable[[], Graph]] = {
    "rope": lambda: decoder(Attention(2, rope=ROPE, qk_norm=RMSNorm())),
    "table": lambda: decoder(positions=LearnedPositions(9)),
    "table with an offset": lambda: decoder(positions=LearnedPositions(9, offset=2)),
    "sinusoids": lambda: decoder(positions=Sinusoidal(9)),
    "ALiBi": lambda: decoder(Attention(2, bias=ALiBi())),
    "T5, shared": lambda: decoder(position_bias=T5Bias(heads=2)),
    "T5, each": lambda: decoder(Attention(2, bias=T5Bias(8, 20))),
    "Shaw": lambda: decoder(RelativeAttention(2, 3)),
    "latent": lambda: decoder(MLA(2, 8, 6, 4, 6, ROPE)),
    "linear": lambda: decoder(LinearAttention(2, ROPE)),
    "everything": lambda: decoder(Attention(2, rope=ROPE, bias=ALiBi()), positions=LearnedPositions(9)),
    "a bias by hand": Tiny(alibi=True).graph,
    "encoder, rope": lambda: encoder(Attention(2, rope=ROPE)),
    "encoder, table": lambda: encoder(positions=LearnedPositions(9), embed_norm=LayerNorm(), token_types=2),
    "encoder, ALiBi": lambda: encoder(Attention(2, bias=ALiBi())),
    "encoder, Shaw": lambda: encoder(RelativeAttention(2, 3)),
}


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.halved
@pytest.mark.parametrize(("name", "first"), by_turns(POSITIONED, ["", "pack-qkv, fuse-residual-norm, "]))
def test_positions_are_removed(name: str, first: str) -> None:
    before = POSITIONED[name]()
    after = run_passes(before, f"{first}strip-positions", verify=True)
    assert "position_ids" not in after.inputs and "max_positions" not in after.meta
    left = {"rope", "alibi", "relative_position_bias", "relative_attention", "iota"}
    assert not left & {n.op.name for n in after.nodes}
    assert str(run_passes(after, "strip-positions")) == str(after)
    if not first and before.name != "encoder":
        run_passes(after, "kv-cache", verify=True)


@pytest.mark.parametrize("name", [name for name in POSITIONED if name.startswith("encoder")])
def test_an_encoder_without_positions_reads_a_set(name: str) -> None:
    """Shuffled tokens give shuffled features; before, they did not."""
    before, equivalence, order = POSITIONED[name](), EquivalenceCheck(), [3, 0, 4, 1, 2]
    for graph, same in ((before, False), (run_passes(before, "strip-positions"), True)):
        inputs = equivalence.make_inputs(graph)
        shuffled = equivalence.run(graph, {name: x[:, order] for name, x in inputs.items()})["last_hidden_state"]
        plain = equivalence.run(graph, inputs)["last_hidden_state"][:, order]
        seen = inputs["attention_mask"][:, order] != 0
        assert (measure_difference(plain[seen], shuffled[seen]) < 1e-12) == same


def test_a_bias_that_may_be_a_mask_stays() -> None:
    g = Graph("masked")
    ids = g.add_input("input_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    x = ops.embedding(ids, weight(g, "embed", 9, 8))
    at = ops.cast(ops.iota(ids, axis=1), to=dtypes.f32)
    apart = ops.sub(ops.unsqueeze(at, axes=(1,)), ops.unsqueeze(at, axes=(0,)))
    near = ops.less(apart, ops.affine(apart, by=0.0, plus=3.0))
    hidden = ops.where(near, ops.affine(apart, by=0.0), ops.affine(apart, by=0.0, plus=-1e4))
    g.add_output("y", ops.attention(x, x, x, ops.unsqueeze(hidden, axes=(0, 1)), heads=1, kv_heads=1, causal=True))
    trace = Trace()
    assert str(applied("strip-positions", g, trace)) == str(g)
    assert [r.reason for r in trace.refusals] == ["it is computed by comparisons and may be a mask"]


def test_strip_refuses() -> None:
    with pytest.raises(WeftError, match="graph decoder has caches already; run strip-positions before kv-cache"):
        run_passes(rotary(), "kv-cache, strip-positions")


def test_check_notices_remaining_positions() -> None:
    before = POSITIONED["everything"]()
    (one,) = parse_pipeline("strip-positions").passes
    after = run_passes(before, "strip-positions")
    for wrong in (run_passes(after, "insert-rope"), run_passes(after, "sliding-window{size=2}")):
        with pytest.raises(WeftError, match="output logits differs by"):
            one.check(before, wrong, EquivalenceCheck())


HEAD = """graph g {
  input %input_ids: i64[batch, seq]
  input %position_ids: i64[batch, seq]
  param %embed: f32[9, 4] = normal([9, 4], std=1.0, stream="e")
  param %table: f32[12, 4] = normal([12, 4], std=1.0, stream="p")
  %token: f32[batch, seq, 4] = embedding(%input_ids, %embed)
"""


def graph(place: str) -> Graph:
    return parse(
        f"{HEAD}{place}  %row: f32[batch, seq, 4] = embedding(%place, %table)\n"
        "  %x: f32[batch, seq, 4] = add(%token, %row)\n  output x = %x\n}"
    )


@pytest.mark.parametrize(
    ("place", "first"),
    [
        ("%place: i64[batch, seq] = affine(%position_ids, by=1.0, plus=2.0)\n", 2),
        ("%place: i64[batch, seq] = affine(%position_ids, by=2.0, plus=0.0)\n", None),
        ("%one: i64[seq] = iota(%input_ids, axis=1) %two: i64[1, seq] = unsqueeze(%one, axes=[0]) "
         "%place: i64[batch, seq] = expand(%two, shape=[batch, seq])\n", 0),
    ],
    ids=["offset", "stretched", "counted"],
)  # fmt: skip
def test_table_of_positions_is_found_with_its_first_row(place: str, first: int | None) -> None:
    g = graph(place)
    (row,) = find_position_tables(g)
    assert row.output.name == "row" and find_first_row(row) == first
    names = {v.name for v in find_position_values(g)}
    assert {"place", "row"} <= names and names.isdisjoint({"token", "x", "input_ids"})


def test_table_of_tokens_is_none() -> None:
    g = graph("%place: i64[batch, seq] = affine(%input_ids, by=1.0, plus=2.0)\n")
    assert find_position_tables(g) == []
    assert {v.name for v in find_position_values(g)} == {"position_ids"}
