"""Checks of compiled models: equality with their source, quality on a text.

Never here: passes, runtimes.
"""
