"""Pictures of a model: a page to click through, an SVG to print, Mermaid, DOT, a tree for the terminal.

network    what there is to draw: the operations of a weft graph, or of any ONNX model, with their facts
onnx_*     the same of an ONNX file: its names and metadata as scopes, constants, operators in the words of weft
segments   layers of a model whose names do not tell them
outline    the operations as a tree of scopes, equal layers folded into repeats
wiring     which values go as lines between the parts of a scope; notes: what is written for the others
arrange    the parts of a scope as boxes in columns and rows: the residual stream straight, branches beside it
place      sizes and coordinates, lines between boxes
labels     what is written on a part, and its kind
style      colours and marks of kinds, light and dark
plain      shapes as plain data; page: the file with these, and the style sheet and scripts in web/
opening    which parts are open; sheet: the facts beside a picture, and the picture in words
svg        the picture to print; png: its pixels; mermaid, dot, tree: the same for others to lay out
gallery    models side by side on one page

Never here: what a model is or costs (weft.ir, weft.passes), where it comes from (weft.frontends).
"""
