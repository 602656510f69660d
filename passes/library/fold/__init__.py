"""Passes that fold factors, norms, biases and linear maps into weights."""
