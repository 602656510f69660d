"""A base whose subclasses are frozen dataclasses without a decorator."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from typing import Any, dataclass_transform


@dataclass_transform(frozen_default=True)
class Frozen:
    """Make each subclass a frozen dataclass; arguments of the class statement, such as kw_only, go to `dataclass`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, **kwargs)(cls)
        for method in ("__setattr__", "__delattr__"):  # @dataclass(frozen=True) refuses classes that define them
            delattr(cls, method)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")
