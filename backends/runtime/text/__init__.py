"""Text to tokens and back, chat templates, and sources that are no text.

Never here: tensors, executors.
"""
