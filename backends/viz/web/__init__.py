"""Interactive pages: one HTML file with everything in it.

Never here: layout, facts, anything fetched from a network.
"""
