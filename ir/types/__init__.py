"""Types of values: sizes of axes, element types, tensor types.

Never here: values, weights, anything that depends on an op.
"""

from .tensor_type import Shape, TensorType

__all__ = ["Shape", "TensorType"]
