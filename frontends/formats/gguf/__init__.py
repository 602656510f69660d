"""GGUF files (llama.cpp's format): their tensors as a `TensorReader`, their tokenizer as Hugging Face files.

Code here knows the file format. Never here: which tensor is which parameter; that is in a family's table.
"""

from __future__ import annotations

from .reader import GGUFTensors
from .tokenizer import TokenIds, read_token_ids, write_tokenizer

__all__ = ["GGUFTensors", "TokenIds", "read_token_ids", "write_tokenizer"]
