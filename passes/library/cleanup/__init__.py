"""Clean-up passes: dead code, common subexpressions, constants, dtypes, padding."""
