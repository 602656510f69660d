"""Readers and writers of file formats: Hugging Face folders, GGUF files, weft's own folders.

Never here: commands, architectures.
"""
