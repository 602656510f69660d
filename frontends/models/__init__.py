"""Published architectures: model families as tables, presets by name.

Never here: readers of files, modules of the DSL.
"""
