"""File formats: Hugging Face folders, GGUF files, folders of weft. They read and write; they decide nothing.

Never here: commands, architectures.
"""
