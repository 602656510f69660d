"""The vocabulary of family tables, and what applies one to a config and a checkpoint.

Never here: a family.
"""
