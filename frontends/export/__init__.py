"""Out again: a graph, rewritten or not, as a checkpoint that others load.

Which family a graph is of is not believed but compared: a config is proposed from what is read off the graph
(`facts`, `configs`), the family's own table builds the graph of that config, and the two are matched value by value
(`matching`). The names and layouts of the family's tensors are its recipes read backwards (`inversion`).
"""
