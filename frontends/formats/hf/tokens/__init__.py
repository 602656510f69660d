"""The tokenizer of a Hugging Face folder: its files, read together as transformers reads them.

Code here reads and writes tokenizers and chat templates. Never here: weights, configs of models.
"""
