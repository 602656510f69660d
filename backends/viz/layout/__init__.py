"""Layout: boxes, lines and text in pixels.

Never here: output formats, facts.
"""
