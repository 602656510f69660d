"""Edits of a graph that passes are built from: patterns and their driver, replacements, factors absorbed into weights.

Never here: a pass, an analysis that changes nothing.
"""
