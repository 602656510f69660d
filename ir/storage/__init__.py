"""Files: untrusted ones read with limits, and results written so that nothing is lost.

`documents` reads text and JSON. `output` writes: weft writes results only by `whole_folder` and `whole_file`.
`contents` records and checks the files of a folder, `partials` names and removes temporary files, `stamps` notices
sources that change while they are read, `disk` wraps the system calls. Never here: the meaning of the files.
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
