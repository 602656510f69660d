"""Kernels run compiled where there is a GPU, elsewhere in Triton's interpreter, in process, on CPU tensors.

Triton looks at TRITON_INTERPRET when it is imported, so tests/conftest.py sets it for all tests; the launchers do not:
they ask `launch.INTERPRETED`, which is true in this folder only. Every test puts its tensors on `device`.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from weft.backends.torch.kernels.shared import launch

# Without Triton, the tests of launch.py alone run: they check that every tensor is refused.
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py", "cpu/*", "prefill/*", "shared/test_[!l]*.py"]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Device that runs kernels: the GPU, or the CPU with Triton's interpreter switched on for this test."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setattr(launch, "INTERPRETED", True)
    return torch.device("cpu")
