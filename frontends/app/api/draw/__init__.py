"""Pictures of sources, differences and galleries.

Never here: layout, output formats.
"""
