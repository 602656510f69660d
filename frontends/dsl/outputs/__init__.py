"""Modules that compute one vector per sequence from the hidden states of a model's layers.

Never here: layers, embeddings, heads that predict tokens.
"""

from __future__ import annotations

from .sentence_modules import Dense, SentencePooling, Unchanged, UnitLength, WeightedLayerPooling, WordWeights

__all__ = ["Dense", "SentencePooling", "Unchanged", "UnitLength", "WeightedLayerPooling", "WordWeights"]
