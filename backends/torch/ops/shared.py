"""Values of the model's own forward, which layers share."""

from __future__ import annotations

from weft.ir.graph import Value


def is_shared(value: Value) -> bool:
    """Return whether the model's own forward makes `value`."""
    return value.producer is None or not value.producer.scope
