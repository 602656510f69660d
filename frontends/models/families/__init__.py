"""Model families as tables of differences: config keys to settings, checkpoint names to parameters.

One vocabulary of settings describes every family, `build` turns settings into a model once, and a `Family` says only
where the settings and the weights are found, in folders of Hugging Face and in GGUF files, and who loads an export.
Never here: file formats.
"""

from __future__ import annotations

from ..tables.family import Architecture, Family, Loaded, describe, key, load
from ..tables.rope_config import rope_of
from ..tables.settings import Settings, build
from . import bart, bert, bloom, deepseek, eleuther, experts, gemma, gpt2, gpt_oss, llama, mamba, opt, switch, t5

_TABLES = (bart, bert, bloom, deepseek, eleuther, experts, gemma, gpt2, gpt_oss, llama, mamba, opt, switch, t5)

FAMILIES: dict[str, Family] = {
    model_type: family
    for module in _TABLES
    for family in vars(module).values()
    if isinstance(family, Family)
    for model_type in family.model_types
}


def architectures() -> dict[str, Architecture]:
    """Return the GGUF architectures of all families, by their names in files."""
    return {family.gguf.model_types[0]: family.gguf for family in FAMILIES.values() if family.gguf is not None}


__all__ = [
    "FAMILIES",
    "Architecture",
    "Family",
    "Loaded",
    "Settings",
    "architectures",
    "build",
    "describe",
    "key",
    "load",
    "rope_of",
]
