"""PyTorch as a target: readable source for one architecture, the kernels it uses, and the same module in process.

A graph becomes text in these steps:

- `lowering` turns its nodes into statements (`program`), by the functions in `ops`; `positions` and `states` say where
  a call begins and what is kept from call to call.
- `structure` gathers the statements of a scope into a method, equal scopes into one class, chained calls into loops.
- `source` writes the classes (`classes`): called by `titles`, described by `about`, made of what `members` holds, their
  lines by `body` and `naming`. Functions of `parts` that the text names are copied in (`library`).
- `module` runs the text and loads the weights; `export` writes a folder, with the scripts in `shipped`.

`step` writes decode.py, one token by few of the Triton `kernels`, by the same means; `explain` tells which; `parallel`
shares a model between processes.
Never here: model families, checkpoint formats, rewrites of graphs.
"""
