"""Pictures as files and text: SVG, PNG, DOT, Mermaid, a tree for the terminal.

Never here: interactive pages (`web`), layout.
"""
