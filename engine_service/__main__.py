"""`python -m engine_service` is `fairhearth`.

Decides how an interrupt ends the command while it is still being read, which takes half a second.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command; return the exit code."""
    try:
        from engine_service.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("fairhearth: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
