"""The type of what `load_source` takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from weft.ir.graph import Graph

    from .sources import Model


class Architecture(Protocol):
    """An object that makes a graph: a `Decoder`, an `Encoder`, an `EncoderDecoder`, or one of your own."""

    def graph(self, *, seed: int = 0, name: str = "") -> Graph:
        """The graph called `name`, its parameters initialized with `seed`."""


SourceLike: TypeAlias = "str | Path | Model | Graph | Architecture"
