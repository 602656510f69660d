"""Reports of runs: costs, refusals, near misses, results of checks."""

from __future__ import annotations

from weft.ir import Graph, parse
from weft.passes import Report, run_passes
from weft.passes.report import GraphCost

from .zoo import ZOO

GRAPH = """graph g {
  input %x: f32[batch, seq, 4]
  param %w: f32[6, 4] = normal([6, 4], std=1.0, stream="w")
  param %unread: f16[5, 3] = normal([5, 3], std=1.0, stream="u")
  %y: f32[batch, seq, 6] = linear(%x, %w)
  %sum: f32[batch, seq, 6] = add(%y, %y)
  output z = %sum
}
"""


def report_of(graph: Graph, pipeline: str, **options: bool) -> Report:
    report = Report(priced=options.pop("priced", False))
    run_passes(graph, pipeline, report=report, **options)
    return report


def test_costs_are_flops_and_bytes_before_and_after() -> None:
    """Of 64 tokens: 2·6·4 FLOPs and 6 additions each; f32[6, 4], and f16[5, 3] that nothing reads."""
    (record,) = report_of(parse(GRAPH), "dce", priced=True).records
    flops = 64 * (2 * 6 * 4 + 6)
    assert record.costs == (GraphCost(flops, 6 * 4 * 4 + 5 * 3 * 2), GraphCost(flops, 6 * 4 * 4))
    assert f"  {flops:,} FLOPs for 64 tokens, 126 -> 96 bytes of parameters" in str(record).splitlines()
    assert str(record).startswith("dce: 1 rewrite, 2 nodes, ")


def test_costs_and_checks_are_off_by_default() -> None:
    (record,) = report_of(parse(GRAPH), "dce").records
    assert record.costs is None and record.evidence == "" and "FLOPs" not in str(record)


def test_evidence_of_checks_is_reported() -> None:
    exact, lossy = report_of(parse(GRAPH), "dce, cast{dtype=f16}", verify=True).records
    assert exact.evidence.startswith("Outputs before and after agree to 1e-12")
    assert "  shown (exact): Outputs before" in str(exact)
    assert "  shown (lossy): The outputs are equal in exact arithmetic" in str(lossy)


def test_largest_difference_is_reported() -> None:
    same, packed = report_of(ZOO["variant/grouped"](), "dce, pack-qkv, fold-norm-scale", verify=True).records[::2]
    assert same.difference == 0 and packed.difference is not None and 0 < packed.difference <= 1e-12
    assert report_of(parse(GRAPH), "dce").records[0].difference is None


def test_pass_without_rewrites_reports_its_nearest_miss() -> None:
    missed, unlike, did = report_of(parse(GRAPH), "pack-qkv, fuse-residual-norm, dce").records
    assert missed.idle == "pack-qkv rewrote nothing: no attention has q, k or v from several linears of the same value"
    assert unlike.idle == "fuse-residual-norm rewrote nothing: no match found"
    assert did.idle == ""


def test_warnings_are_found_among_the_lines() -> None:
    (record,) = report_of(parse(GRAPH), "dce").records
    assert record.warnings == []
    for layer in range(2):
        record.trace.note(f"dce: warning: %layers.{layer}.attn is odd")
    assert record.warnings == ["dce: warning: %layers.0.attn is odd (× 2)"]


def test_lines_that_differ_in_the_layer_only_are_counted() -> None:
    (record,) = report_of(parse(GRAPH), "dce").records
    for layer in range(3):
        record.trace.record_rewrite("rule", f"layers.{layer}.attn.q2.1")
        record.trace.refuse("rule", f"layers.{layer}.attn.q2.{layer}", "because")
    assert str(record).splitlines()[2:] == [
        "  rule: rewrote %layers.0.attn.q2.1 (× 3)",
        "  rule: left %layers.0.attn.q2.0 alone: because",
        "  rule: left %layers.1.attn.q2.1 alone: because",
        "  rule: left %layers.2.attn.q2.2 alone: because",
    ]
