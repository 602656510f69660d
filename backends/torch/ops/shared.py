"""What layers may share: values that the model's own forward has."""

from __future__ import annotations

from weft.ir.graph import Value


def is_shared(value: Value) -> bool:
    """Whether the model's own forward has `value`."""
    return value.producer is None or not value.producer.scope
