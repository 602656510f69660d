"""Analyses of tokens: which nodes treat each alone, and how attention scores those before it."""
