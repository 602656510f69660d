"""PyTorch as a target: readable source for one architecture, the kernels it uses, and the same module in process.

A graph becomes text in these steps:

- `lower` turns its nodes into the statements of a `program`, by the functions in `ops`.
- `codegen` gathers the statements of a scope into a method, equal scopes into one class, chained calls into loops, and
  writes the classes. Functions that the text names are copied in from `snippets`.
- `decode` writes decode.py, which computes one token with few of the Triton `kernels`.
- `package` runs the text and loads the weights, in process or as a folder with scripts.
- `transformers` builds upon these the folders with own code that the library transformers loads.

`build` makes these steps in order, for the target's entry in `backends.catalogue`.
Never here: model families, checkpoint formats, rewrites of graphs.
"""
