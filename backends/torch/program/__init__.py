"""The program of a model: statements over named tensors, modules and weights, and the emitter that collects them.

Never here: lines of Python (`codegen` writes them), lowerings of single ops (`ops`).
"""
