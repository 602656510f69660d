"""The graph: values, nodes, parameters, outputs, the verifier and the analysis view.

Never here: ops, the parser of the text form, rewrites.
"""

from .graph import AttrValue, Graph, Node, Op, Param, Value

__all__ = ["AttrValue", "Graph", "Node", "Op", "Param", "Value"]
