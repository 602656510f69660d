"""Functions that `import weft` offers: load, compile, run, verify, evaluate, train, inspect, draw, export.

Never here: printing, parsing of arguments.
"""
