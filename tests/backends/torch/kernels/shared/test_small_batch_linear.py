"""Products of few rows on a CPU: weights that oneDNN packs, and dtypes that it refuses to pack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from weft.backends.torch.kernels.shared import small_batch_linear as rows
from weft.backends.torch.package.explain import explain_cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REASON = "bf16 path needs the cpu support avx_ne_convert or avx512bw, avx512vl and avx512dq"


@pytest.fixture
def refuses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """oneDNN as on a CPU without AVX-512, which refuses bf16; the list of what it was asked to pack."""
    real, asked = torch.ops.mkldnn._reorder_linear_weight, list[torch.dtype]()

    def pack(weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        asked.append(weight.dtype)
        if weight.dtype == torch.bfloat16:
            raise RuntimeError(REASON)
        packed: torch.Tensor = real(weight, *rest)
        return packed

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", pack)
    rows.refusal.cache_clear()
    yield asked
    rows.refusal.cache_clear()


def near(dtype: torch.dtype) -> None:
    """Check `linear` of one and several rows, twice with one weight, against float64."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 40, generator=generator).to(dtype)
    for count in (1, 3, rows.MOST_ROWS + 1):
        x = torch.randn(count, 40, generator=generator).to(dtype)
        for _ in range(2):
            found, exact = rows.linear(x, weight), F.linear(x.double(), weight.double())
            assert found.dtype == dtype
            assert (found - exact).abs().max() <= 40 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_agrees_with_float64_on_this_cpu(dtype: torch.dtype) -> None:
    near(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_refused_dtype_falls_back_to_linear(dtype: torch.dtype, refuses: list[torch.dtype]) -> None:
    near(dtype)
    times = {torch.float32: 2, torch.bfloat16: 1}  # the question, then the weight if it may be packed
    assert refuses == [dtype] * times.get(dtype, 0)


def test_explain_reports_packed_weights_or_the_reason(refuses: list[torch.dtype]) -> None:
    assert explain_cpu(torch.float32) == "on this CPU: torch, weights packed by oneDNN"
    assert explain_cpu(torch.bfloat16) == f"on this CPU: F.linear, {REASON}"
    assert explain_cpu(torch.float16) == "on this CPU: F.linear, weights in torch.float16 are not packed"
    assert refuses == [torch.float32, torch.bfloat16]
