"""Scores of attention: nodes that compute biases, and what decode kernels support."""

from __future__ import annotations

import pytest

from weft.ir import Graph, WeftError, parse
from weft.passes.analysis.tokens.scores import explain_unsupported_scores, find_bias_nodes

HEAD = """graph g {
  input %input_ids: i64[batch, seq]
  input %position_ids: i64[batch, seq]
  param %slopes: f32[2] = alibi_slopes(2)
  %count: i64[seq] = iota(%input_ids, axis=1)
  %keys: i64[1, seq] = unsqueeze(%count, axes=[0])
"""


def graph(body: str) -> Graph:
    return parse(f"{HEAD}{body}\n}}")


BIAS = "%bias: f32[batch, 2, seq, seq] = alibi(%slopes, %position_ids, %keys) output bias = %bias "


def test_bias_nodes_include_the_iotas_that_count_keys() -> None:
    g = graph(f"{BIAS} %other: f32[2] = exp(%slopes) output other = %other")
    assert [n.output.name for n in find_bias_nodes(g, [g.outputs["bias"]])] == ["count", "keys", "bias"]
    assert find_bias_nodes(g, []) == []


def test_iota_of_a_bias_and_of_other_nodes_is_refused() -> None:
    g = graph(f"{BIAS} %late: i64[seq] = affine(%count, plus=1.0) output late = %late")
    with pytest.raises(WeftError, match="the iota %count is read by a bias and by other nodes; use one iota for each"):
        find_bias_nodes(g, [g.outputs["bias"]])


@pytest.mark.parametrize(
    ("pattern", "keep_first", "latent", "reason"),
    [
        ("dense", 0, False, None),
        ("dense", 2, True, None),
        ("chunked", 0, False, None),
        ("chunked", 1, False, "its pattern is chunked"),
        ("dilated", 0, True, "its pattern is dilated"),
        ("strided", 0, False, "its pattern is strided"),
    ],
)
def test_patterns_of_kernels(pattern: str, keep_first: int, latent: bool, reason: str | None) -> None:
    assert explain_unsupported_scores(None, pattern, keep_first, latent) == reason


def test_biases_of_kernels_are_alibi_of_positions() -> None:
    g = graph(
        "%a: f32[batch, 2, seq, seq] = alibi(%slopes, %position_ids, %position_ids) output a = %a "
        f"{BIAS} %soft: f32[batch, 2, seq, seq] = exp(%a) output soft = %soft"
    )
    reasons = {name: explain_unsupported_scores(bias, "dense", 0, False) for name, bias in g.outputs.items()}
    assert reasons == {
        "a": None,
        "bias": "its ALiBi does not count positions",
        "soft": "it has a bias that is not ALiBi's",
    }
