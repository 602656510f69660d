"""Read and write the files of a Hugging Face tokenizer and its chat templates, as transformers does.

Never here: weights, configs of models.
"""
