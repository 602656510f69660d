"""GGUF files (llama.cpp's format): their tensors as an reader, their tokenizer as Hugging Face files.

What belongs here knows the file format only. Which tensor is which parameter of which architecture is a family table
and lives with the families.
"""

from __future__ import annotations

from .reader import GGUFTensors
from .tokenizer import TokenIds, token_ids, write_tokenizer

__all__ = ["GGUFTensors", "TokenIds", "token_ids", "write_tokenizer"]
