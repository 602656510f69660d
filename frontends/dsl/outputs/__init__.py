"""Modules over the states of a model's last layer: one vector of a text.

What belongs here reads what the layers made. Never here: layers, embeddings, heads that predict tokens.
"""

from __future__ import annotations

from .sentence import Dense, SentencePooling, Unchanged, UnitLength, WeightedLayerPooling, WordWeights

__all__ = ["Dense", "SentencePooling", "Unchanged", "UnitLength", "WeightedLayerPooling", "WordWeights"]
