"""Analyses of the steps of recurrences: detect steps that are affine in their state, and derive their parallel forms.

They read a step and return graphs; backends choose which to run. Never here: rewrites of whole graphs, a target's code.
"""
