"""Every decoder of the zoo, and random ones, as engines hold them; `make test-engines`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...backends.torch.transformers.test_folders_zoo import decoders
from ..scale.test_contract import check, check_degrees


@pytest.mark.parametrize("name", [*decoders(), *(f"random/{i}" for i in range(30, 60))])
def test_packed_sequences_equal_separate_ones(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.parametrize("seed", range(8, 60))
def test_devices_and_stages(seed: int, tmp_path: Path) -> None:
    check_degrees(f"drawn/{seed}", tmp_path)
