"""The vocabulary of family tables, and the code that applies one to a config and a checkpoint.

Never here: a family itself.
"""
