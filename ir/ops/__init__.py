"""The op set, one file per family; `ops.linear` is the op called linear. Importing this package fills the registry.

Compositions of existing ops are functions `emit_…` in the module of those ops: sinusoids in `positions`, noisy and
hierarchical routing in `routing`, multi-head latent attention in `latent`.

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
    op = globals()[name] = OPS[name.rstrip("_")]  # ops are compared often, and globals skip this function
    return op
