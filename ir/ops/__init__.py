"""The op set, one file per family; `ops.linear` is the op called linear. Importing this package fills the registry.

What a paper names but is made of other ops is a function that emits them, beside the ops it uses: `positions` has
sinusoidal; `routing` noisy_logits and hierarchical; `latent` multi-head latent attention.

Never here: an op whose meaning depends on a target; a file called like an op.
"""

import importlib
import pkgutil

from ..op import OPS, Op

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def __getattr__(name: str) -> Op:
    if name.rstrip("_") not in OPS:
        raise AttributeError(f"no op is called {name!r}")
    op = globals()[name] = OPS[name.rstrip("_")]  # an attribute from now on: ops are compared often
    return op
