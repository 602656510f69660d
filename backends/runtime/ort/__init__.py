"""The executor on ONNX Runtime: sessions, decoders, encoders, their caches and states.

Never here: sampling, text.
"""
