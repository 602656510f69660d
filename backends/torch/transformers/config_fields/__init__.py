"""Names for the sizes and attributes of an architecture: the fields of a config, and expressions over them.

Never here: source of classes.
"""
