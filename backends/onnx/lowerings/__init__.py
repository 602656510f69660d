"""Lowerings to ONNX operators, one file per family of ops.

Never here: the registry and the emitter (one level up), files on disk.
"""
