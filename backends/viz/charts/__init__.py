"""Charts of measurements: axes, and what is drawn along them.

Never here: measuring; pictures of models.
"""
