"""Passes that change the number, order or size of attention heads."""
