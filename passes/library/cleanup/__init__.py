"""Passes that tidy up: dead code, common subexpressions, constants, dtypes, padding."""
