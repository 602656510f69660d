"""The config fields of a model: sizes and float attributes of its architecture."""

from __future__ import annotations

import itertools
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
        """Return the name of the field for `role` with this `value`; add it to `values` if it is new.

        The name is the first of `role`, encoder_`role` (for `side` "encoder"), `kind`_`role` (for a `kind`), `role`_2,
        `role`_3, … that is new or has this value.
        """
        words = [w for w in (self.side, kind) if w not in ("", "decoder") and not role.startswith(w)]
        names = itertools.chain(  # transformers reads decoder_x as x
            [role], (f"{w}_{role}" for w in words), (f"{role}_{i}" for i in itertools.count(2))
        )
        name = next(name for name in names if self.values.get(name, value) == value)
        self.values.setdefault(name, value)
        return name

    def choose_size(self, role: str, value: int, kind: str = "") -> Poly:
        """Return the name that `choose_name` returns, as a symbolic size."""
        return sizes.sym(self.choose_name(role, value, kind))
