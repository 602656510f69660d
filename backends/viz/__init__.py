"""Pictures of a model: a page to click through, an SVG to print, Mermaid, DOT, a tree for the terminal.

A picture is made in these steps:

- `model` collects what there is to draw: the operations of a graph with their facts, as a tree of scopes with equal
  layers folded into repeats. `onnx_files` collects the same from any ONNX file.
- `layout` arranges the parts of a scope as boxes with sizes, coordinates and lines: the residual stream straight,
  branches beside it.
- `formats` writes a picture as SVG, PNG, Mermaid, DOT or a tree, and describes it in words.
- `web` writes the interactive page, `panels` the plain data of what it shows beside the picture.
- `compare` finds what differs between two models.

Never here: what a model is or costs (weft.ir, weft.passes), where it comes from (weft.frontends).
"""
