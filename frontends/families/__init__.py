"""Model families as tables of differences: config keys to settings, checkpoint names to parameters.

One vocabulary of settings describes every family, `build` turns settings into a model once, and a `Family` says only
where the settings and the weights are found. Never here: file formats.
"""

from __future__ import annotations

from .bart import BART, MARIAN, MBART, PEGASUS
from .bert import BERT
from .experts import MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from .family import Family, Loaded, key, load
from .gpt2 import GPT2
from .llama import LLAMA, MISTRAL, OLMO2, QWEN2, QWEN3
from .rope import rope_of
from .settings import Settings, build
from .switch import SWITCH
from .t5 import MT5, T5, UMT5

FAMILIES: dict[str, Family] = {
    model_type: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GPT2, BERT, T5, MT5, UMT5, SWITCH, BART, MBART, MARIAN, PEGASUS),
        *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE),
    )
    for model_type in family.model_types
}

__all__ = ["FAMILIES", "Family", "Loaded", "Settings", "build", "key", "load", "rope_of"]
