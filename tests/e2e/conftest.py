"""The errors that the table tests measure, kept for `weft families`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from weft.frontends.families import FAMILIES
from weft.frontends.families.verified import Errors, read_verified, write_verified


@pytest.fixture(scope="module")
def errors() -> Iterator[Errors]:
    """What the tests measure: family, target, way of running -> the largest error of its rows.

    With ``WEFT_FAMILIES=write`` they replace those of the same families in the committed file.
    """
    measured: Errors = {}
    yield measured
    if os.environ.get("WEFT_FAMILIES") == "write":
        assert "PYTEST_XDIST_WORKER" not in os.environ, "the errors are collected in one process: -n 0"
        known = {**read_verified(), **measured}
        write_verified({family: known[family] for family in FAMILIES if family in known})
