"""Tokenizer, chat templates, and sources of encoder-decoders (token ids or sound).

Never here: tensors, executors.
"""
