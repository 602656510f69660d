"""Python as it is where neither PyTorch nor transformers is installed, for folders on PYTHONPATH."""

import sys

for name in ("torch", "transformers"):
    # None makes Python's import fail, which typeshed does not describe.
    sys.modules[name] = None  # type: ignore[assignment]
