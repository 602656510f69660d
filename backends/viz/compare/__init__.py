"""Two networks compared: which operations correspond, and what changed.

Never here: pictures of the result.
"""
