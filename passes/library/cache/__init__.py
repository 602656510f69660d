"""Passes that turn a full forward pass into a decode step: caches, rolling buffers, logits of the last token."""
