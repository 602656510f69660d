"""Values inside a model for a text, and its outputs with scaled parts.

Never here: the passes that add outputs and inputs (weft.passes); pictures (draw/).
"""
