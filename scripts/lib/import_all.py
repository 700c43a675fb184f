"""Import every module of engine_service that this environment can hold, and say how many there were.

The ExLlamaV2 adapter needs torch and a GPU host, and is the only module allowed to stay out.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib.util import find_spec

import engine_service

_ONLY_WITH = {"engine_service.backends.exllamav2": "exllamav2"}


def main() -> int:
    """Import the modules one by one; the first that fails ends with its traceback."""
    names = [module.name for module in pkgutil.walk_packages(engine_service.__path__, "engine_service.")]
    kept = [name for name in names if name not in _ONLY_WITH or find_spec(_ONLY_WITH[name])]
    for name in kept:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    print(f"Python {sys.version.split()[0]}: {len(kept)} modules imported, {len(names) - len(kept)} left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
