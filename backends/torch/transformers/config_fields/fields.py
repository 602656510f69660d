"""The config fields of a model: sizes and float attributes of its architecture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weft.ir.types import sizes
from weft.ir.types.sizes import Poly


@dataclass
class Fields:
    """The config fields and their values, in order of first use. side: "encoder" while the sizes of the encoder of an
    encoder-decoder are named, else "decoder" or ""."""

    values: dict[str, Any] = field(default_factory=dict)
    side: str = ""

    def choose_name(self, role: str, value: Any, kind: str = "") -> str:
        """Return the name of the field for `role` with this `value`, which is added to `values` if it is new.

        It is `role` itself; if that field has another value, `role` with the prefix encoder_ (on that side) or that of
        `kind`, then with a number from 2 on at the end.
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
        """Return the field that `choose_name` returns as a symbolic size."""
        return sizes.sym(self.choose_name(role, value, kind))
