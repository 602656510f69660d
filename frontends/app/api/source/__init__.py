"""Sources: whatever a command names, as a graph with its weights.

Never here: file formats, rewriting.
"""
