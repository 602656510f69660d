"""The machinery of passes: the base class Pass, traces, checks of effects, pipelines and their parser.

Never here: a pass, a pattern of a particular architecture.
"""
