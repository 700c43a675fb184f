"""`python -m engine_service` is `fairhearth`."""

from __future__ import annotations

import sys

from engine_service.cli import main

if __name__ == "__main__":
    sys.exit(main())
