"""Folders that weft writes: graphs as text beside their weights, manifests.

Never here: formats of others.
"""
