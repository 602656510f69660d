"""`weft inspect --parallel` of every model of the zoo: whole it has the bytes of its folder, divided it is counted or
refused in one sentence; `make test-engines`."""

from __future__ import annotations

import pytest

from weft.backends.torch.transformers.scale.estimate import ParallelCosts, estimate_costs
from weft.backends.torch.transformers.scale.shards import Split
from weft.backends.torch.transformers.transformers_folder import TransformersFolder
from weft.frontends.app.api.inspect.parallel import list_device_rows, list_traffic_rows, summarize_split
from weft.ir.errors import WeftError

from ...backends.torch.transformers.folders import graph_of, lowered
from ...backends.torch.transformers.test_folders_zoo import decoders, encoders
from ...lowered import forms

SPLITS = (Split(tp=2), Split(tp=3), Split(pp=2), Split(ep=2), Split(tp=2, ep=4), Split(tp=2, pp=2))


def costs(built: TransformersFolder, split: Split) -> ParallelCosts:
    return estimate_costs(built.base, built.plans, built.tensors, split, "f32", 4, 16)


def reason(built: TransformersFolder, split: Split) -> str:
    """The sentence that refuses a split; nothing if it is possible."""
    try:
        costs(built, split)
    except WeftError as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("name", [*decoders(), *encoders()])
def test_parallel_counts_match_the_folder_or_are_refused(name: str) -> None:
    built = TransformersFolder(forms(lowered(graph_of(name)), "transformers"), "f32", 64, "Tiny", [])
    (device,) = costs(built, Split()).stages
    assert device.weights == built.weight_bytes
    for split in SPLITS:
        found = costs(built, split) if (refused := reason(built, split)) == "" else None
        if found is None:
            assert "\n" not in refused
            continue
        assert found.collectives and max(stage.weights for stage in found.stages) < device.weights
        assert len(list_device_rows(found)) == split.pp and [*list_traffic_rows(found)] and summarize_split(found)
        assert sum(stage.flops for stage in found.stages) == device.flops
