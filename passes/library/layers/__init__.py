"""Passes that change layers: their number, norms, activations, feed-forwards, the residual stream."""
