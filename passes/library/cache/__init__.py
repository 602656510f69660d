"""Passes for decoding: KV caches and states, rolling buffers, quantized caches, logits of the last token."""
