"""Caches and states of a compiled model, as it records them; and inferred for models compiled before.

Folders record every state in weft.json, generated modules of PyTorch say the growth of their caches. Older ones, and
folders of onnxruntime-genai's builder, only have names: of the inputs, of the classes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from weft.ir.schema.states import Growth
from weft.ir.storage.documents import Record

from ..facts import Carried


def recorded(manifest: Record) -> tuple[Carried, ...]:
    """The states that a manifest records for the inputs of its graph; none if it is older than such records.

    Raises WeftError when a record is broken.
    """
    growths = tuple(growth.value for growth in Growth)
    return tuple(
        Carried(
            record.text("input"),
            record.text("output"),
            Growth(record.choice("growth", growths)),
            float(record.get("initial", float, 0.0)),
        )
        for record in manifest.records("carried", [])
        if "input" in record
    )


_CACHE, _STATE = re.compile(r"past_key_values\.(\d+)\.(?:key|value)"), re.compile(r"past_states\.\d+\.\w+")


def by_name(inputs: Iterable[str], rolling: Collection[int] = ()) -> tuple[Carried, ...]:
    """The states among the `inputs` of a graph that nothing records; `rolling` are the numbers of caches that roll."""
    found = []
    for name in inputs:
        if (cache := _CACHE.fullmatch(name)) is not None:
            growth = Growth.WINDOW if int(cache[1]) in rolling else Growth.TEXT
            found.append(Carried(name, name.replace("past_key_values", "present"), growth))
        elif _STATE.fullmatch(name):
            found.append(Carried(name, name.replace("past_states", "present_states"), Growth.CONSTANT))
    return tuple(found)


_CLASSES = {
    **dict.fromkeys(("KVCache", "KeyCache"), Growth.TEXT),
    **dict.fromkeys(("RollingKVCache", "RollingKeyCache"), Growth.WINDOW),
    **{"State": Growth.CONSTANT, "CrossCache": Growth.SOURCE},
}


def growth_of(layer: Any) -> Growth:
    """The growth of a cache object of a generated module."""
    return Growth(layer.growth) if hasattr(layer, "growth") else _CLASSES[type(layer).__name__]
