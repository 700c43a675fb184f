"""Check the integration's files as Home Assistant's own validator and HACS would.

Home Assistant's validator, hassfest, runs in the project's continuous integration but is in no package. This
checker holds the rules that concern a custom integration of our kind: manifest, translations, actions, icons,
brand, quality scale, and hacs.json. It reads files only and imports nothing of the integration.

Usage: check_integration.py REPOSITORY     prints one line a problem and exits 1 if there is any
"""

from __future__ import annotations

import ast
import json
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from integration_rules import (
    HACS_KEYS,
    ICONS,
    INTEGRATION_TYPES,
    IOT_CLASSES,
    MANIFEST_OPTIONAL,
    MANIFEST_REQUIRED,
    PLATFORMS,
    QUALITY_RULES,
    QUALITY_SCALES,
    TRANSLATIONS,
    VERSION,
)

DOMAIN = "fairhearth"


class Unreadable(Exception):
    """A file is missing or is not what its name promises; the text says which and why."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, keys in file order; raise Unreadable."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"repeated keys: {', '.join(repeated)}")
        return dict(pairs)

    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path.name}: {error}") from error
    if not isinstance(value, dict):
        raise Unreadable(f"{path.name}: expected an object, found {type(value).__name__}")
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, {} where it is empty; raise Unreadable."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise Unreadable(f"{path.name}: {error}") from error
    if not isinstance(value, dict):
        raise Unreadable(f"{path.name}: expected a mapping, found {type(value).__name__}")
    return value


def manifest_problems(folder: Path) -> Iterator[str]:
    """Yield what is wrong with manifest.json."""
    manifest = read_json(folder / "manifest.json")
    keys = list(manifest)
    if wanted := sorted(MANIFEST_REQUIRED - set(keys)):
        yield f"manifest.json: missing keys: {', '.join(wanted)}"
    if unknown := sorted(set(keys) - MANIFEST_REQUIRED - MANIFEST_OPTIONAL):
        yield f"manifest.json: unknown keys: {', '.join(unknown)}"
    ordered = sorted(keys, key=lambda key: (key != "domain", key != "name", key))
    if keys != ordered:
        yield f"manifest.json: keys must be in the order: {', '.join(ordered)}"
    if manifest.get("domain") != folder.name:
        yield f"manifest.json: domain is {manifest.get('domain')!r}, the folder is {folder.name!r}"
    if not all(str(owner).startswith("@") for owner in manifest.get("codeowners") or [""]):
        yield "manifest.json: codeowners must name at least one account, each beginning with @"
    for key in ("documentation", "issue_tracker"):
        if not str(manifest.get(key, "")).startswith("https://"):
            yield f"manifest.json: {key} must be an https address"
    if "home-assistant.io/integrations" in str(manifest.get("documentation")):
        yield "manifest.json: documentation must not point to Home Assistant's own pages"
    if not VERSION.fullmatch(str(manifest.get("version"))):
        yield f"manifest.json: version {manifest.get('version')!r} is not like 1.2.3 or 1.2.3b4"
    for key, allowed in (
        ("iot_class", IOT_CLASSES),
        ("integration_type", INTEGRATION_TYPES),
        ("quality_scale", QUALITY_SCALES),
    ):
        if key in manifest and manifest[key] not in allowed:
            yield f"manifest.json: {key} {manifest[key]!r} is none of {', '.join(sorted(allowed))}"
    for requirement in manifest.get("requirements", []):
        if "==" not in requirement:
            yield f"manifest.json: requirement {requirement!r} must be pinned with =="
    if manifest.get("config_flow") and not (folder / "config_flow.py").is_file():
        yield "manifest.json: config_flow is true, but there is no config_flow.py"


def shape_problems(value: object, shape: object, where: str) -> Iterator[str]:
    """Yield where a nested value departs from a shape made of dicts, "*" for any key, and str for a text."""
    if shape is str:
        if not isinstance(value, str):
            yield f"{where}: expected a text, found {type(value).__name__}"
        return
    if not isinstance(value, Mapping) or not isinstance(shape, Mapping):
        yield f"{where}: expected an object, found {type(value).__name__}"
        return
    for key, inner in value.items():
        if key in shape or "*" in shape:
            if not re.fullmatch(r"[a-z0-9_-]+", key) and "*" in shape and not where.endswith("range"):
                yield f"{where}.{key}: a key may hold only a-z, 0-9, _ and -"
            yield from shape_problems(inner, shape.get(key, shape.get("*")), f"{where}.{key}")
        else:
            yield f"{where}.{key}: unknown key; known here: {', '.join(sorted(shape))}"


def texts(value: object, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text of a nested object with its dotted place."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from texts(inner, f"{where}.{key}" if where else key)
    elif isinstance(value, str):
        yield where, value


def placeholders(text: str) -> set[str]:
    """Return the names in braces."""
    return set(re.findall(r"\{(\w+)\}", text))


def translation_problems(folder: Path) -> Iterator[str]:
    """Yield what is wrong with translations/*.json; English is the reference for the other languages."""
    english = read_json(folder / "translations" / "en.json")
    reference = dict(texts(english))
    for path in sorted((folder / "translations").glob("*.json")):
        translation = english if path.stem == "en" else read_json(path)
        yield from shape_problems(translation, TRANSLATIONS, f"translations/{path.name}")
        for where, text in texts(translation):
            place = f"translations/{path.name}: {where}"
            if not text.strip() or text != text.strip():
                yield f"{place}: empty, or with white space around it"
            if "[%key:" in text:
                yield f"{place}: references are not resolved in custom integrations; write the text"
            if re.search(r"<[a-zA-Z/]", text):
                yield f"{place}: no HTML"
            if re.search(r"https?://", text):
                yield f"{place}: no literal address; use a placeholder"
            if where not in reference:
                yield f"{place}: not in en.json"
            elif placeholders(text) != placeholders(reference[where]):
                yield f"{place}: placeholders differ from en.json"
    yield from config_flow_problems(english)


def config_flow_problems(english: Mapping[str, Any]) -> Iterator[str]:
    """Yield fields of a form that have no description, or a description without a field."""
    subentries = english.get("config_subentries", {})
    flows = {"config": english.get("config", {})}
    flows |= {f"config_subentries.{name}": flow for name, flow in subentries.items()}
    for name, flow in flows.items():
        for step, content in flow.get("step", {}).items():
            fields, described = set(content.get("data", {})), set(content.get("data_description", {}))
            for field in sorted(fields - described):
                yield f"translations/en.json: {name}.step.{step}.data_description.{field} is missing"
            for field in sorted(described - fields):
                yield f"translations/en.json: {name}.step.{step}.data.{field} is missing"
    for name, flow in subentries.items():
        if "entry_type" not in flow or "user" not in flow.get("initiate_flow", {}):
            yield f"translations/en.json: config_subentries.{name} needs entry_type and initiate_flow.user"


def action_problems(folder: Path) -> Iterator[str]:
    """Yield actions that are not the same in services.yaml, the translations, the icons and the code."""
    path = folder / "services.yaml"
    described = read_yaml(path) if path.exists() else {}
    translated = read_json(folder / "translations" / "en.json").get("services", {})
    icons = read_json(folder / "icons.json").get("services", {}) if (folder / "icons.json").exists() else {}
    code = "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py")))
    for action in sorted({*described, *translated, *icons}):
        places = {"services.yaml": described, "translations/en.json": translated, "icons.json": icons}
        for name, known in places.items():
            if action not in known:
                yield f"{name}: action {action} is missing"
        if f'"{action}"' not in code:
            yield f"services.yaml: action {action} is named nowhere in the code"
        fields = set((described.get(action) or {}).get("fields", {}))
        translated_fields = translated.get(action, {}).get("fields", {})
        for field in sorted(fields ^ set(translated_fields)):
            yield f"action {action}: field {field} is in only one of services.yaml and translations/en.json"
        for field, text in translated_fields.items():
            if not {"name", "description"} <= set(text):
                yield f"translations/en.json: services.{action}.fields.{field} needs name and description"


def icon_problems(folder: Path) -> Iterator[str]:
    """Yield what is wrong with icons.json."""
    if not (folder / "icons.json").exists():
        return
    icons = read_json(folder / "icons.json")
    yield from shape_problems(icons, ICONS, "icons.json")
    entities = read_json(folder / "translations" / "en.json").get("entity", {})
    for platform, keys in icons.get("entity", {}).items():
        for key in keys:
            if key not in entities.get(platform, {}):
                yield f"icons.json: entity.{platform}.{key} has no translation"
    for where, icon in texts(icons):
        if not re.fullmatch(r"mdi:[a-z0-9-]+", icon):
            yield f"icons.json: {where}: {icon!r} is not like mdi:name"


def constant_keyword(call: ast.Call, name: str) -> str | None:
    """Return a keyword argument that is a literal text, else None."""
    values = [keyword.value for keyword in call.keywords if keyword.arg == name]
    if values and isinstance(values[0], ast.Constant) and isinstance(values[0].value, str):
        return values[0].value
    return None


def used_translations(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield (section, key, line) for each translation that a module names literally."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                key = constant_keyword(node, "translation_key")
                if key and name.endswith("create_issue"):
                    yield "issues", key, node.lineno
                elif key and any(keyword.arg == "translation_domain" for keyword in node.keywords):
                    yield "exceptions", key, node.lineno
                elif key and name.endswith("Description") and path.stem in PLATFORMS:
                    yield f"entity.{path.stem}", key, node.lineno
            case ast.Assign(
                targets=[ast.Name(id="_attr_translation_key")], value=ast.Constant(value=str(key))
            ):
                if path.stem in PLATFORMS:
                    yield f"entity.{path.stem}", key, node.lineno


def code_problems(folder: Path) -> Iterator[str]:
    """Yield translations that the code names and that do not exist, and a setup without its schema."""
    english = read_json(folder / "translations" / "en.json")
    for path in sorted(folder.rglob("*.py")):
        for section, key, line in used_translations(path):
            known: Any = english
            for part in section.split("."):
                known = known.get(part, {})
            if key not in known:
                yield f"{path.relative_to(folder)}:{line}: translation {section}.{key} does not exist"
    init = (folder / "__init__.py").read_text(encoding="utf-8")
    if re.search(r"^async def async_setup\(", init, re.MULTILINE) and "CONFIG_SCHEMA" not in init:
        yield "__init__.py: async_setup needs CONFIG_SCHEMA = cv.config_entry_only_config_schema(DOMAIN)"


def brand_problems(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the brand pictures that Home Assistant shows."""
    icon = folder / "brand" / "icon.png"
    if not icon.is_file():
        yield "brand/icon.png: missing"
        return
    head = icon.read_bytes()[:24]
    if head[:8] != b"\x89PNG\r\n\x1a\n":
        yield "brand/icon.png: not a PNG"
    elif (size := struct.unpack(">II", head[16:24])) != (256, 256):
        yield f"brand/icon.png: {size[0]}x{size[1]} pixels, must be 256x256"


def quality_problems(folder: Path) -> Iterator[str]:
    """Yield what is wrong with quality_scale.yaml."""
    rules = read_yaml(folder / "quality_scale.yaml").get("rules", {})
    if wanted := sorted(QUALITY_RULES - set(rules)):
        yield f"quality_scale.yaml: missing rules: {', '.join(wanted)}"
    if unknown := sorted(set(rules) - QUALITY_RULES):
        yield f"quality_scale.yaml: unknown rules: {', '.join(unknown)}"
    for rule, verdict in rules.items():
        status = verdict.get("status") if isinstance(verdict, dict) else verdict
        if status not in ("done", "todo", "exempt"):
            yield f"quality_scale.yaml: {rule}: status {status!r} is none of done, todo, exempt"
        if status == "exempt" and not (isinstance(verdict, dict) and verdict.get("comment")):
            yield f"quality_scale.yaml: {rule}: an exemption needs a comment"


def hacs_problems(repository: Path) -> Iterator[str]:
    """Yield what is wrong with hacs.json."""
    hacs = read_json(repository / "hacs.json")
    if "name" not in hacs:
        yield "hacs.json: name is missing"
    if unknown := sorted(set(hacs) - HACS_KEYS):
        yield f"hacs.json: unknown keys: {', '.join(unknown)}"
    if not re.fullmatch(r"\d{4}\.\d{1,2}\.\d+", str(hacs.get("homeassistant"))):
        yield f"hacs.json: homeassistant {hacs.get('homeassistant')!r} is not a version like 2026.11.0"


def problems(repository: Path) -> Iterator[str]:
    """Yield every problem; an unreadable file is one, and stops only the check that needed it."""
    folder = repository / "custom_components" / DOMAIN
    checks = (
        (hacs_problems, repository),
        (manifest_problems, folder),
        (translation_problems, folder),
        (action_problems, folder),
        (icon_problems, folder),
        (code_problems, folder),
        (brand_problems, folder),
        (quality_problems, folder),
    )
    for check, place in checks:
        try:
            yield from check(place)
        except Unreadable as error:
            yield str(error)


def main(arguments: list[str]) -> int:
    """Print the problems of a repository; return 1 if there are any."""
    repository = Path(arguments[0] if arguments else ".").resolve()
    if not (repository / "custom_components" / DOMAIN / "manifest.json").exists():
        print(f"custom_components/{DOMAIN} has no manifest.json yet: nothing to check")
        return 0
    found = list(dict.fromkeys(problems(repository)))
    for problem in found:
        print(problem)
    print(f"integration files: {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
