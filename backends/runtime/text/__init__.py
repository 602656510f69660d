"""Tokenizers, chat templates, and the inputs of encoders in encoder-decoders (token ids or sound).

Never here: tensors, executors.
"""
