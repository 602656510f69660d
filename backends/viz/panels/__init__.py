"""What there is to tell of a model beside its picture: plain data that the page draws, a panel each.

kinds      the distinct attentions of a network, and which layers have them
attention  which token sees which, how a rolling cache is filled, and how far layers see together
positions  wavelengths of rotary positions, before and after their scaling
caches     what keys and values take against the length of the text, here and with other heads
experts    who is asked for a token, and what stays idle
prompts    what attention and predictions are for a text, where there are weights

A panel is left out where the model has nothing to tell in it. Never here: how it looks (web/).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..model.network import Network
from . import attention, caches, experts, positions

PANELS: dict[str, Callable[[Network], Any]] = {
    "attention": attention.data,
    "positions": positions.data,
    "caches": caches.data,
    "experts": experts.data,
}


def data(network: Network) -> dict[str, Any]:
    """The panels of `network` by name."""
    made = {name: panel(network) for name, panel in PANELS.items()}
    return {name: panel for name, panel in made.items() if panel}
