"""A graph as a GGUF file: keys, names, tokenizer.

Never here: the reader of GGUF files.
"""
