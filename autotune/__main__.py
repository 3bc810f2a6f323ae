"""Command line of the tuner: ``python -m autotune --kernel paged_attn``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from autotune.options import parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code (2 for a refused request, 130 for Ctrl-C)."""
    options = parser().parse_args(argv)
    try:
        from autotune import command  # torch and all: only now, so that --help answers at once

        return command.run(options)
    except KeyboardInterrupt:
        print(
            "autotune: stopped; all that was measured is kept, and the same command, or --resume, "
            "goes on",
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it ends in order
    sys.exit(main())
