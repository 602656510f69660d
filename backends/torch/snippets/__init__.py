"""Functions and small classes that generated models contain: their source is copied into model.py as it stands here.

So each reads well on its own and uses only torch, `F`, `nn`, `math`, kernels and other parts. Shapes are in docstrings.
Never here: anything that a generated file must not contain, such as imports of weft.
"""
