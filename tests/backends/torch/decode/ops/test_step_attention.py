"""Attention in a decode step: projections, cache writes and kernels."""

from __future__ import annotations

import ast

import pytest

from weft import Decoder, Mask
from weft.backends.torch.kernels.shared import launch

from .....lowered import step_of, write_step
from .....passes.zoo_variants import attends
from ..fused_ops import KERNELS, cases_of, check, write_statements


@pytest.mark.parametrize("name", cases_of("step_attention"))
def test_torch_computes_the_cases_of_ops(name: str) -> None:
    check(name, kernel=False)


@KERNELS
@pytest.mark.usefixtures("few_processors")
@pytest.mark.parametrize("name", cases_of("step_attention"))
def test_kernels_compute_the_cases_of_ops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)
    check(name, kernel=True)


@pytest.mark.parametrize(
    ("name", "projection", "arguments"),
    [
        ("norm_qkv-0", "norm_qkv({0}, {1}, {2}.k, {2}.v, {3}, norm={4}, cos={5}, sin={6})", "tickets={7}"),
        (
            "norm_qkv-2",
            "norm_qkv({0}, {1}, {2}.k, {2}.v, {3}, q_norm={4}, k_norm={5}, cos={6}, sin={7}, interleaved=True, "
            "tickets={8})",
            "tickets={8}",
        ),
    ],
)
def test_the_projection_is_an_argument_of_attention(name: str, projection: str, arguments: str) -> None:
    statement = write_statements(name).rpartition("\n")[2]
    assert statement == f"decode_attention({projection}, {{2}}.k, {{2}}.v, {{3}}, {arguments}).flatten(2)"


def test_latent_attention_reads_the_rank_from_its_weight() -> None:
    statement = write_statements("latent_qk-1").rpartition("\n")[2]
    projection = "latent_qk({2}, {3}, {4}, {0}.k, {1}, {5}, {6}, interleaved=True)"
    assert statement == f"latent_decode({projection}, {{0}}.k, {{1}}, 5, tickets={{7}}).flatten(1)[:, None]"


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (attends(window=3), "window=3, rolling=True"),
        (attends(window=3, keep_first=2), "window=3, rolling=True, keep_first=2"),
        (attends(softcap=5.0), "softcap=5.0"),
        (attends(mask=Mask(pattern="chunked", stride=4)), "chunk=4"),
        (attends(mask=Mask(pattern="dilated", stride=2)), "dilation=2"),
    ],
)
def test_attention_names_what_limits_its_keys_and_scores(model: Decoder, arguments: str) -> None:
    source = ast.parse(write_step(model.graph())[0])
    calls = [n for n in ast.walk(source) if isinstance(n, ast.Call)]
    (attention,) = {ast.unparse(n) for n in calls if ast.unparse(n.func) == "decode_attention"}
    assert arguments in attention.rpartition(", self.cache.v, ")[2]


def test_attention_without_a_kernel_gives_its_reason() -> None:
    step = step_of(attends(mask=Mask(pattern="strided", stride=2)).graph())
    assert step is not None
    reasons = {choice.reason for choice in step.choices if not choice.kernel}
    assert any("strided" in reason for reason in reasons), reasons
