"""Text to tokens and back, and chat templates.

Never here: tensors, executors.
"""
