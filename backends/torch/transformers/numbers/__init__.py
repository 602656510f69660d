"""Numbers of an architecture by their names: what a config says, and what a source reads from it.

Never here: text of classes.
"""
