"""Analyses of the steps of recurrences: which are affine in their state, and what that makes of them.

They read a step and return graphs; backends choose what to run. Never here: rewrites of whole graphs, text of a target.
"""
