"""Analyses of tokens: which nodes treat tokens independently, and how attention scores keys.

Never here: a change of a graph.
"""
