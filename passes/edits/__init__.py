"""Building blocks of passes: patterns and their driver, replacements, maps absorbed into weights, legalization.

Never here: a pass, an analysis that changes nothing.
"""
