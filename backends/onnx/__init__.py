"""The ONNX backend: ops become ONNX operators, weights stream into external data, configs are written beside them.

Never here: rewrites of the graph (they are passes), anything that asks which model family this is.
"""
