"""File formats: Hugging Face folders, GGUF files, folders of weft. They only read and write.

Never here: commands, architectures.
"""
