"""States of compiled models: records of the manifest, and names of inputs and classes in folders without records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.backends.runtime.state_io import get_growth
from weft.backends.torch.lib import caches
from weft.backends.torch.lib.recurrent_states import RecurrentState
from weft.ir.errors import WeftError
from weft.ir.schema.states import Growth

from ..handmade import decoder, opened, save


def test_manifest_records_override_inferred_states(tmp_path: Path) -> None:
    """Without a record, as in older folders, the names of the inputs tell."""
    cache = (1, ["batch", 1, 4, 8])
    names = [f"{a}.0.{b}" for a in ("past_key_values", "present") for b in ("key", "value")]
    model = decoder(**dict.fromkeys(names, cache))

    def record(growth: str) -> list[dict[str, str]]:
        return [{"input": a, "output": b, "growth": growth} for a, b in zip(names[:2], names[2:], strict=True)]

    def rewinds(**manifest: Any) -> bool:
        return opened(save(tmp_path, model, **manifest)).decoder.can_rewind

    assert rewinds() and rewinds(carried=record("text"))
    assert not rewinds(cache=[{"rolling": True}]) and not rewinds(carried=record("window"))
    with pytest.raises(WeftError, match="growth is 'sideways'"):
        rewinds(carried=record("sideways"))
    extra = {"input": "past_states.0.ssm", "output": "present_states.0.ssm", "growth": "constant"}
    with pytest.raises(WeftError, match=r"has no input past_states\.0\.ssm, although weft\.json lists it"):
        rewinds(carried=[*record("text"), extra])
    with pytest.raises(WeftError, match=rf"has the input {names[1]}, which the runtime cannot provide"):
        rewinds(carried=record("text")[:1])


def test_cache_classes_of_older_modules_are_known_by_name() -> None:
    for name in ("KVCache", "KeyCache", "RollingKVCache", "RollingKeyCache", "CrossCache"):
        assert get_growth(type(name, (), {})()) is get_growth(object.__new__(getattr(caches, name)))
    assert get_growth(type("State", (), {})()) is get_growth(RecurrentState()) is Growth.CONSTANT
