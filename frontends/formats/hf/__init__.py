"""Readers of Hugging Face folders: config.json, safetensors (one file or shards), generation_config.json, tokenizers.

Never here: the mapping of checkpoint keys to parameters; that is in a family's table.
"""

from __future__ import annotations

from .folder import Folder, extract_submodel, load_folder
from .merging import join_adapters
from .safetensors import SafetensorsReader

__all__ = ["Folder", "SafetensorsReader", "extract_submodel", "join_adapters", "load_folder"]
