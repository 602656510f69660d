"""Bisection of two models: the first operation whose results differ, and how.

Never here: pictures, passes.
"""
