"""Import every module of engine_service that this environment can hold, and say how many there were.

The adapters of ExLlamaV2 and ExLlamaV3 need torch, and are the only packages whose modules may stay out.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib.util import find_spec

import engine_service

_ONLY_WITH = {f"engine_service.backends.{name}.": name for name in ("exllamav2", "exllamav3")}


def main() -> int:
    """Import the modules one by one; the first that fails ends with its traceback."""
    names = [module.name for module in pkgutil.walk_packages(engine_service.__path__, "engine_service.")]
    missing = tuple(prefix for prefix, package in _ONLY_WITH.items() if not find_spec(package))
    kept = [name for name in names if not name.startswith(missing)]
    for name in kept:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    print(f"Python {sys.version.split()[0]}: {len(kept)} modules imported, {len(names) - len(kept)} left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
