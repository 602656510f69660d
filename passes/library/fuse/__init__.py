"""Passes that fuse several nodes into one op, and their inverses."""
