"""Panels next to a picture: JSON data that the page draws, one kind of panel per module.

kinds      the distinct attentions of a network, and their layers
attention  causal and window masks, slots of a rolling cache, receptive fields
positions  wavelengths of rotary positions, before and after their scaling
caches     KV cache bytes by sequence length, of this model and with other head counts
experts    routing of a token to experts, and the share of experts that stays idle
prompts    attention weights and predictions for a prompt, if the model has weights

A panel about layers that a model lacks is omitted. Never here: appearance (web/).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..model.network import Network
from . import cache_panel, expert_panel, mask_panel, rope_panel

PANELS: dict[str, Callable[[Network], Any]] = {
    "attention": mask_panel.build_panel,
    "positions": rope_panel.build_panel,
    "caches": cache_panel.build_panel,
    "experts": expert_panel.build_panel,
}


def build_panels(network: Network) -> dict[str, Any]:
    """Return the data of the panels of `network`, keyed by name; omit empty ones."""
    return {name: panel for name, build in PANELS.items() if (panel := build(network))}
