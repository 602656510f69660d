"""The registry of lowerings: order of registration, and the condition of each."""

from __future__ import annotations

from typing import Any

import pytest

from weft.backends.torch.program import registry
from weft.ir import ops
from weft.ir.registry import Alternatives


@pytest.fixture(autouse=True)
def lowerings(monkeypatch: pytest.MonkeyPatch) -> Alternatives[registry.Lowering]:
    """Replace the lowerings of weft by an empty registry."""
    empty: Alternatives[registry.Lowering] = Alternatives("lowered op", "", "")
    monkeypatch.setattr(registry, "LOWERINGS", empty)
    return empty


def test_lowerings_are_tried_in_order_of_registration(lowerings: Alternatives[registry.Lowering]) -> None:
    @registry.lowering(ops.add, ops.mul)
    def plain(e: Any, node: Any) -> None: ...

    @registry.lowering(ops.add, when=lambda node: "too wide", kernels=True)
    def kernel(e: Any, node: Any) -> None: ...

    @registry.lowering(ops.add, first=True)
    def best(e: Any, node: Any) -> None: ...

    assert [x.name for x in lowerings["add"]] == ["best", "plain", "kernel"]
    assert [x.name for x in lowerings["mul"]] == ["plain"]
    refuses: Any = None
    assert [x.when(refuses) for x in lowerings["add"]] == [None, None, "too wide"]
    assert [x.kernels for x in lowerings["add"]] == [False, False, True]
    assert lowerings["mul"][0].emit is plain
