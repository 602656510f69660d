"""Folders that weft writes: model folders (a graph as text, with its weights), and manifests of compiled folders.

Never here: formats of other tools.
"""
