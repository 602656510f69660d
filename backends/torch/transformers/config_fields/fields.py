"""The fields of a config: the sizes and float attributes of an architecture, each with a name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weft.ir.types import sizes
from weft.ir.types.sizes import Poly


@dataclass
class Fields:
    """The config fields and their values, in order of first use; `side` is the side of the model that is being
    named."""

    values: dict[str, Any] = field(default_factory=dict)
    side: str = ""

    def choose_name(self, role: str, value: Any, kind: str = "") -> str:
        """Return the field for a `role`: an existing one with this value, or a new one.

        If the field called `role` has another value, the name gets the prefix encoder or `kind`, or a number at the
        end.
        """
        words = [self.side] * (self.side == "encoder") + [kind]  # transformers reads decoder_x as x
        candidates = [role, *(f"{word}_{role}" for word in words if word)]
        number = 1
        while True:
            name = candidates.pop(0) if candidates else f"{role}_{(number := number + 1)}"
            if name not in self.values or self.values[name] == value:
                self.values.setdefault(name, value)
                return name

    def choose_size(self, role: str, value: int, kind: str = "") -> Poly:
        """Return the field for a `role` as a symbolic size; see `choose_name`."""
        return sizes.sym(self.choose_name(role, value, kind))
