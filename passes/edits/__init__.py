"""Building blocks of passes: patterns and their driver, replacements, linear maps folded into weights, legalization.

Never here: a pass, an analysis that changes nothing.
"""
