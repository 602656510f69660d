"""Files: untrusted files read with limits, and results written atomically.

`documents` reads text and JSON. `output` writes: weft writes results only by `replace_folder` and `replace_file`.
`contents` records and checks the files of a folder, `partials` creates and removes temporary files, `stamps` detects
sources that change while they are read, `disk` wraps system calls. Never here: the meaning of the files.
"""

from .contents import MANIFEST as MANIFEST
from .contents import PROVENANCE as PROVENANCE
from .contents import amend_manifest as amend_manifest
from .contents import check_contents as check_contents
from .contents import check_format as check_format
from .contents import read_checked as read_checked
from .contents import write_manifest as write_manifest
from .output import check_replaceable as check_replaceable
from .output import replace_file as replace_file
from .output import replace_folder as replace_folder
from .partials import scratch_folder as scratch_folder
from .stamps import Stamp as Stamp
from .stamps import check_unchanged as check_unchanged
from .stamps import take_stamps as take_stamps
