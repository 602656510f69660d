"""The `weft` command, also as `python -m weft`."""

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line. Ctrl-C during its imports also ends the process with status 130, without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_interrupted)
    from weft.frontends.app.cli import main as run

    if signal.getsignal(signal.SIGINT) is _exit_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    except KeyboardInterrupt:  # before or after the command's own handler
        _exit_interrupted(signal.SIGINT, None)


def _exit_interrupted(number: int, frame: FrameType | None) -> None:
    os.write(2, b"weft: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
