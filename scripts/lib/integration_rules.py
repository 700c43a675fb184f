"""What Home Assistant's validator and HACS accept, as data for check_integration.py.

Source: script/hassfest of Home Assistant 2026.11, its developer documentation (quality scale), and the HACS
action (2026-08). Only what a custom integration with config entries, entities and actions needs is listed.
"""

from __future__ import annotations

import re

MANIFEST_REQUIRED = {
    "codeowners",
    "documentation",
    "domain",
    "integration_type",
    "iot_class",
    "issue_tracker",  # asked for by HACS
    "name",
    "version",
}
MANIFEST_OPTIONAL = {
    "after_dependencies",
    "categories",
    "config_flow",
    "connectivity",
    "dependencies",
    "import_executor",
    "loggers",
    "quality_scale",
    "requirements",
    "single_config_entry",
    "zeroconf",
}
IOT_CLASSES = {"assumed_state", "calculated", "cloud_polling", "cloud_push", "local_polling", "local_push"}
INTEGRATION_TYPES = {"device", "entity", "hardware", "helper", "hub", "service", "system", "virtual"}
QUALITY_SCALES = {"bronze", "silver", "gold", "platinum"}
# The platforms of the integration, whose entities' names are translated under entity.<platform>.
PLATFORMS = {
    "ai_task",
    "binary_sensor",
    "button",
    "conversation",
    "event",
    "number",
    "select",
    "sensor",
    "switch",
}
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc|-alpha\.?|-beta\.?|-rc\.?)\d+)?")

HACS_KEYS = {
    "content_in_root",
    "country",
    "filename",
    "hacs",
    "hide_default_branch",
    "homeassistant",
    "name",
    "persistent_directory",
    "render_readme",
    "zip_release",
}

_SECTION = {"name": str, "description": str, "data": {"*": str}, "data_description": {"*": str}}
_STEP = {
    "title": str,
    "description": str,
    "data": {"*": str},
    "data_description": {"*": str},
    "menu_options": {"*": str},
    "menu_option_descriptions": {"*": str},
    "sections": {"*": _SECTION},
    "submit": str,
}
_FLOW = {
    "step": {"*": _STEP},
    "error": {"*": str},
    "abort": {"*": str},
    "progress": {"*": str},
    "create_entry": {"*": str},
}
_STATE_ATTRIBUTES = {"*": {"name": str, "state": {"*": str}}}
# The shape of translations/<language>.json: "*" is any key, str is a text.
TRANSLATIONS = {
    "title": str,
    "config": {"flow_title": str, **_FLOW},
    "config_subentries": {"*": {"entry_type": str, "initiate_flow": {"*": str}, **_FLOW}},
    "options": _FLOW,
    "entity": {
        "*": {
            "*": {
                "name": str,
                "state": {"*": str},
                "state_attributes": _STATE_ATTRIBUTES,
                "unit_of_measurement": str,
            }
        }
    },
    "entity_component": {"*": {"name": str, "state": {"*": str}, "state_attributes": _STATE_ATTRIBUTES}},
    "device": {"*": {"name": str}},
    "device_automation": {"*": {"*": str}},
    "exceptions": {"*": {"message": str}},
    "issues": {"*": {"title": str, "description": str, "fix_flow": _FLOW}},
    "selector": {"*": {"options": {"*": str}}},
    "services": {
        "*": {
            "name": str,
            "description": str,
            "fields": {"*": {"name": str, "description": str, "example": str}},
            "sections": {"*": {"name": str, "description": str}},
        }
    },
    "system_health": {"info": {"*": str}},
}
ICONS = {
    "entity": {
        "*": {
            "*": {
                "default": str,
                "state": {"*": str},
                "range": {"*": str},
                "state_attributes": {"*": {"default": str, "state": {"*": str}}},
            }
        }
    },
    "services": {"*": {"service": str, "sections": {"*": str}}},
}

# The rules of the quality scale, by tier.
QUALITY_RULES = frozenset(
    {
        # bronze
        "action-setup",
        "appropriate-polling",
        "brands",
        "common-modules",
        "config-flow",
        "config-flow-test-coverage",
        "dependency-transparency",
        "docs-actions",
        "docs-conditions",
        "docs-high-level-description",
        "docs-installation-instructions",
        "docs-removal-instructions",
        "docs-triggers",
        "entity-event-setup",
        "entity-unique-id",
        "has-entity-name",
        "runtime-data",
        "test-before-configure",
        "test-before-setup",
        "unique-config-entry",
        # silver
        "action-exceptions",
        "config-entry-unloading",
        "docs-configuration-parameters",
        "docs-installation-parameters",
        "entity-unavailable",
        "integration-owner",
        "log-when-unavailable",
        "parallel-updates",
        "reauthentication-flow",
        "test-coverage",
        # gold
        "devices",
        "diagnostics",
        "discovery",
        "discovery-update-info",
        "docs-data-update",
        "docs-examples",
        "docs-known-limitations",
        "docs-supported-devices",
        "docs-supported-functions",
        "docs-troubleshooting",
        "docs-use-cases",
        "dynamic-devices",
        "entity-category",
        "entity-device-class",
        "entity-disabled-by-default",
        "entity-translations",
        "exception-translations",
        "icon-translations",
        "reconfiguration-flow",
        "repair-issues",
        "stale-devices",
        # platinum
        "async-dependency",
        "inject-websession",
        "strict-typing",
    }
)
