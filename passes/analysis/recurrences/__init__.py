"""Analyses of the steps of recurrences: which are affine in their state, and which parallel form follows.

They read a step and return graphs; backends choose which to run. Never here: rewrites of whole graphs, a target's code.
"""
