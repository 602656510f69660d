"""Writing to disk so that nothing is lost: folders and files that appear whole, checksums, locks, leftovers.

`output` is the door: `whole_folder` and `whole_file` are the only ways by which weft writes a result. `contents`
records and checks what a folder holds, `safetensors` writes weights in shards, `partials` names and removes temporary
files, `stamps` notices sources that change while they are read, `disk` wraps the system calls. Never here: what the
files mean.
"""

from .contents import MANIFEST, PROVENANCE, check_contents, check_format, seal
from .output import check_free, whole_file, whole_folder
from .partials import scratch_folder
from .stamps import Stamp, check_unchanged, stamps

__all__ = [
    "MANIFEST",
    "PROVENANCE",
    "Stamp",
    "check_contents",
    "check_format",
    "check_free",
    "check_unchanged",
    "scratch_folder",
    "seal",
    "stamps",
    "whole_file",
    "whole_folder",
]
