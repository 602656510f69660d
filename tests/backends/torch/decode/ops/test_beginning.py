"""Embeddings and rotary angles at the beginning of a decode step."""

from __future__ import annotations

import pytest

from weft.backends.torch.kernels.shared import launch

from ..fused_ops import KERNELS, cases_of, check, write_statements


@pytest.mark.parametrize("name", cases_of("beginning"))
def test_torch_computes_the_cases_of_ops(name: str) -> None:
    check(name, kernel=False)


@KERNELS
@pytest.mark.usefixtures("few_processors")
@pytest.mark.parametrize("name", cases_of("beginning"))
def test_kernels_compute_the_cases_of_ops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)
    check(name, kernel=True)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("embed_tokens-0", "embed_tokens({0}, {1}, {2}, scale=2.0)[0]"),  # no angles: the embeddings alone
        ("embed_tokens-1", "embed_tokens({0}, {1}, {2}, table={3}, offset=2)[0]"),
        ("embed_tokens-2", "embed_tokens({0}, {1}, {2}, ({3}, 1.0), ({4}, 1.2))"),
        ("rotary_angles-1", "(table.flatten(0, 2) for table in rotary_scaled({0}, {1}, 1.3))"),
    ],
)
def test_embeddings_and_angles_are_one_call(name: str, call: str) -> None:
    assert write_statements(name).endswith(f"\n{call}")
