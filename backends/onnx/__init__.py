"""The ONNX backend: it lowers ops to ONNX operators, streams weights into external data, and writes configurations.

Never here: rewrites of the graph (they are passes), code that depends on the model family.
"""
