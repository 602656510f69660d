"""ONNX files of any exporter, read as a network.

Never here: weft graphs, layout.
"""
