"""Functions that `import weft` offers: load, compile, run, verify, evaluate, heal, inspect, draw, export.

Never here: printing, parsing of arguments.
"""
