"""Analyses: facts about a graph for passes and backends. They change nothing.

Never here: rewrites, facts about a target.
"""
