"""GGUF files (llama.cpp's format): read tensors through a `TensorReader`, write the tokenizer as Hugging Face files.

Never here: the mapping of tensors to parameters; that is in a family's table.
"""

from __future__ import annotations

from .reader import GGUFTensors
from .tokenizer import TokenIds, read_token_ids, write_tokenizer

__all__ = ["GGUFTensors", "TokenIds", "read_token_ids", "write_tokenizer"]
