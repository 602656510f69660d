"""Every target, a file for what they share. Importing this package fills the registry.

Never here: lowerings, emitters and executors, which a target only names; heavy imports before they are used.
"""

from . import onnx as onnx
from . import torch as torch
