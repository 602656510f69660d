"""A graph as a Hugging Face folder: config, weights, tokenizer.

Never here: the reader of such folders.
"""
