"""PyTorch as a target: readable source for one architecture, the kernels it uses, and the same module in process.

A graph is compiled in these steps:

- `lower` lowers its nodes to the statements of a `program`, by the functions in `ops`.
- `codegen` groups the statements of a scope into a method, equal scopes into one class, chained calls into loops, and
  writes the classes. Functions that the source calls are copied in from `lib`.
- `decode` writes decode.py, which computes a decode step with a few launches of the Triton `kernels`.
- `package` executes the source and loads the weights, in process or as a folder with scripts.
- `transformers` uses these packages to build folders with custom code that the library transformers loads.

`torch_folder` runs these steps in order, for the target's entry in `backends.targets`.
Never here: model families, checkpoint formats, rewrites of graphs.
"""
