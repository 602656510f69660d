"""Analyses: facts about a graph that passes and backends ask for. They change nothing.

Never here: rewrites, facts about a target.
"""
