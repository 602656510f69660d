"""Functions and small classes of generated models: codegen copies their source verbatim into model.py.

So each must be readable on its own and use only torch, `F`, `nn`, `math`, kernels and other snippets. Shapes are in
docstrings.
Never here: anything that a generated file must not contain, such as imports of weft.
"""
