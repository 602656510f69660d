"""The tokenizer of a Hugging Face folder: its files, read together as transformers reads them.

What belongs here reads and writes tokenizers and chat templates. Never here: weights, configs of models.
"""
