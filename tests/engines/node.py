"""The folder of Node's packages, which `make test-engines` installs."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = Path(os.environ.get("WEFT_NODE", ROOT / "build" / "node")) / "node_modules"
