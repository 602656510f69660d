"""Passes that make a full pass over the text a decode step: caches, rolling buffers, logits of the last token."""
