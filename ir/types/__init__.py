"""Types of values: sizes of axes, element types, tensor types.

Never here: values, weights, anything that knows an op.
"""

from .tensor_type import Shape, TensorType

__all__ = ["Shape", "TensorType"]
