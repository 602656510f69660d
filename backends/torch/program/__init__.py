"""The program of a model: statements over named tensors, modules and weights, and the emitter that collects them.

Never here: source of classes and methods (`codegen`), lowerings of single ops (`ops`).
"""
