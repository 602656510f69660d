"""Reader for ONNX files of any exporter that returns a network to draw.

Never here: weft graphs, layout.
"""
