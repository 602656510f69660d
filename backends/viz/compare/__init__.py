"""Comparison of two networks: corresponding operations and their differences.

Never here: pictures of the result.
"""
