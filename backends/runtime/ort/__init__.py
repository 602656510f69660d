"""The ONNX Runtime executor: sessions, decoders, encoders, their caches and states.

Never here: sampling, text.
"""
