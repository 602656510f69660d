"""Names of the operations of a compared network by the sign of their marks."""

from __future__ import annotations

from weft.backends.viz.model.network import Network


def marked(found: Network, sign: str) -> set[str]:
    return {v.name for v in found.vertices if v.mark and v.mark.sign == sign}
