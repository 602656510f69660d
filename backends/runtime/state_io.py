"""Caches and states of a compiled model, read from its records or inferred for models without records.

Folders record every state in weft.json; generated PyTorch modules name the growth of their caches. For older models
and folders of onnxruntime-genai's builder, states are inferred from the names of inputs and classes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from weft.ir.schema.states import Growth
from weft.ir.storage.documents import Record

from ..folder_facts import StateRecord


def read_states(manifest: Record) -> tuple[StateRecord, ...]:
    """Return the states that a manifest records with a graph input; () without such records, as in older manifests.
    Raises WeftError if a record is broken."""
    growths = tuple(growth.value for growth in Growth)
    return tuple(
        StateRecord(
            record.text("input"),
            record.text("output"),
            Growth(record.choice("growth", growths)),
            float(record.get("initial", float, 0.0)),
        )
        for record in manifest.records("carried", [])
        if "input" in record
    )


_CACHE, _STATE = re.compile(r"past_key_values\.(\d+)\.(?:key|value)"), re.compile(r"past_states\.\d+\.\w+")


def infer_states(inputs: Iterable[str], rolling: Collection[int] = ()) -> tuple[StateRecord, ...]:
    """Return the states among the `inputs` of a graph: names past_key_values.{i}.key|value and past_states.{i}.{part}.
    `rolling` has the indices i of rolling caches. Other inputs are ignored."""
    states = []
    for name in inputs:
        if (cache := _CACHE.fullmatch(name)) is not None:
            growth = Growth.WINDOW if int(cache[1]) in rolling else Growth.TEXT
            states.append(StateRecord(name, name.replace("past_key_values", "present"), growth))
        elif _STATE.fullmatch(name):
            states.append(StateRecord(name, name.replace("past_states", "present_states"), Growth.CONSTANT))
    return tuple(states)


_CLASSES = {
    **dict.fromkeys(("KVCache", "KeyCache"), Growth.TEXT),
    **dict.fromkeys(("RollingKVCache", "RollingKeyCache"), Growth.WINDOW),
    **{"State": Growth.CONSTANT, "CrossCache": Growth.SOURCE},
}


def get_growth(layer: Any) -> Growth:
    """Return the growth of `layer`, a cache object of a generated module: its attribute `growth`, or for modules of
    older versions, which lack it, the growth that the name of the class implies."""
    return Growth(layer.growth) if hasattr(layer, "growth") else _CLASSES[type(layer).__name__]
