"""Checks of compiled models: equality with their source, perplexity on a text.

Never here: passes, runtimes.
"""
