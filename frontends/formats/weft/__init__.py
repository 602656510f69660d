"""Folders that weft writes: graphs in text form with their weights, manifests.

Never here: formats of other tools.
"""
