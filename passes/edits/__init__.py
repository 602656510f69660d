"""Edits of a graph that passes are made of: patterns and their driver, replacements, factors absorbed into weights.

Never here: a pass, an analysis that changes nothing.
"""
