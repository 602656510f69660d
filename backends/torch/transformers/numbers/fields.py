"""The fields of a config: the numbers of an architecture, each with a name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weft.ir.types import sizes
from weft.ir.types.sizes import Poly


@dataclass
class Fields:
    """Names of numbers with their values, in the order in which they come; of which `side` of a model they are."""

    values: dict[str, Any] = field(default_factory=dict)
    side: str = ""

    def name(self, role: str, value: Any, kind: str = "") -> str:
        """The field for a number of this `role`: one that has the value already, or a new one.

        Where the role has another value already, the name tells that it is the encoder's, or the `kind` of what it is
        for, or is numbered.
        """
        words = [self.side] * (self.side == "encoder") + [kind]  # transformers reads decoder_x as x
        candidates = [role, *(f"{word}_{role}" for word in words if word)]
        number = 1
        while True:
            name = candidates.pop(0) if candidates else f"{role}_{(number := number + 1)}"
            if name not in self.values or self.values[name] == value:
                self.values.setdefault(name, value)
                return name

    def size(self, role: str, value: int, kind: str = "") -> Poly:
        """The same as an expression."""
        return sizes.sym(self.name(role, value, kind))
