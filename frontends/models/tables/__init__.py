"""The vocabulary of family tables, and the code that applies a table to a config and a checkpoint.

Never here: tables of families.
"""
