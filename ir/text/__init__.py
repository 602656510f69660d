"""The text form of graphs: lexer and parser.

Never here: what a graph means, file formats of others.
"""
