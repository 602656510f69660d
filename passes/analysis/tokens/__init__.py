"""Analyses of tokens: which nodes treat each alone, and how attention scores those before it.

Never here: a change of a graph.
"""
