"""Pictures of a model: an interactive page, an SVG to print, Mermaid, DOT, a tree for the terminal.

A picture is drawn in these steps:

- `model` collects the operations of a graph with their facts, as a tree of scopes with equal layers folded into
  repeats. `onnx_files` collects the same from any ONNX file.
- `layout` arranges the parts of a scope as boxes with sizes, coordinates and lines: the residual stream straight,
  branches next to it.
- `formats` writes a picture as SVG, PNG, Mermaid, DOT or a tree, and describes it in words.
- `web` writes the interactive page, `panels` the JSON data of the panels next to the picture.
- `compare` finds the differences between two models.

Never here: operators and costs of a model (weft.ir, weft.passes), reading of sources (weft.frontends).
"""
