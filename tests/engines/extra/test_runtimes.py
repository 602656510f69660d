"""Every kind of model in every runtime that pip installs: equal to float64, or refused when weft compiles it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from weft.ir import WeftError

from ..runtime_matrix import MODELS, PRECISIONS, TRIED, measure_error
from ..runtimes import Runtime

REFUSED = {"tract": "Mamba", "mnn": "Mamba f16"}  # by runtime: models and dtypes


@pytest.fixture(scope="module", params=TRIED)
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    started = Runtime(request.param)
    yield started
    started.close()


@pytest.mark.parametrize(("name", "precision"), list(product(MODELS, PRECISIONS)))
def test_models_equal_float64_or_are_refused_by_name(
    runtime: Runtime, name: str, precision: str, tmp_path: Path
) -> None:
    if {name, precision} & set(REFUSED.get(runtime.name, "").split()):
        with pytest.raises(WeftError, match=f"target onnx for {runtime.name} (has no Scan|does not support f16)"):
            measure_error(runtime, name, precision, tmp_path / "out")
    else:
        assert measure_error(runtime, name, precision, tmp_path / "out") <= PRECISIONS[precision]
