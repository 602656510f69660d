"""Files: untrusted files read with limits, and results written atomically.

`documents` reads text and JSON. `output` writes: weft writes results only by `replace_folder` and `replace_file`.
`contents` records and checks the files of a folder, `partials` creates and removes temporary files, `stamps` detects
sources that change while they are read, `disk` wraps system calls. Never here: the meaning of the files.
"""

from .contents import MANIFEST, PROVENANCE, check_contents, check_format, write_manifest
from .output import check_replaceable, replace_file, replace_folder
from .partials import scratch_folder
from .stamps import Stamp, check_unchanged, take_stamps

__all__ = [
    "MANIFEST",
    "PROVENANCE",
    "Stamp",
    "check_contents",
    "check_format",
    "check_replaceable",
    "check_unchanged",
    "replace_file",
    "replace_folder",
    "scratch_folder",
    "take_stamps",
    "write_manifest",
]
