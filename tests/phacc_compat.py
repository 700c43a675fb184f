"""A pytest plugin that comes before all others where Home Assistant is installed; elsewhere it is idle.

pytest-homeassistant-custom-component 0.13.375 was made for Home Assistant 2026.10.
Two things differ in 2026.11:

* Home Assistant replaces ``httpx`` by ``httpx2`` when it is imported, and must therefore come before the
  pytest plugin of respx, which imports ``httpx``.
* The logger integration moved a helper that the package imports by its old place.

To be dropped when a release for 2026.11 exists.
"""

from importlib.util import find_spec

if find_spec("homeassistant") is not None:
    import homeassistant.const  # noqa: F401  (for what its import does)
    from homeassistant.components import logger
    from homeassistant.components.logger import helpers

    if not hasattr(logger, "_clear_logger_overwrites"):
        logger._clear_logger_overwrites = helpers._clear_logger_overwrites
