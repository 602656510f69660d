"""The machinery of passes: the Pass, its trace, the check of its effect, pipelines and their text.

Never here: a pass, a pattern of a particular architecture.
"""
