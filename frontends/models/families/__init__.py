"""Model families as tables of differences: config keys to settings, checkpoint names to parameters.

One vocabulary of settings describes every family, `build` turns settings into a model once, and a `Family` says only
where the settings and the weights are found. Never here: file formats.
"""

from __future__ import annotations

from ..tables.family import Families, Family, Loaded, describe, key, load
from ..tables.rope_config import rope_of
from ..tables.settings import Settings, build
from . import bart, bert, bloom, deepseek, eleuther, experts, gemma, gpt2, gpt_oss, llama, mamba, opt, switch, t5

_TABLES = (bart, bert, bloom, deepseek, eleuther, experts, gemma, gpt2, gpt_oss, llama, mamba, opt, switch, t5)

FAMILIES = Families("family", __name__, "see `weft families`")  # by model_type
for _module in _TABLES:
    FAMILIES.register(*vars(_module).values())

__all__ = ["FAMILIES", "Family", "Loaded", "Settings", "build", "describe", "key", "load", "rope_of"]
