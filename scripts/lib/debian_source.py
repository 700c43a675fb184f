"""Print the system's own Debian source, pointed at another suite, as one deb822 stanza.

Decides which of the configured apt sources carries the Debian archive itself: the first one that names the
release this system runs. Understands both formats, ``*.sources`` (deb822) and ``sources.list`` (one line).
Knows no mirror by name: whatever the system uses is used.

Usage: debian_source.py SUITE [APT_DIRECTORY] [OS_RELEASE_FILE]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

# The names under which a release may be written in a source.
_ALIASES = ("stable", "oldstable", "testing", "unstable")
# What of a stanza still holds for another suite of the same archive.
_KEPT = ("URIs", "Signed-By", "Trusted", "Architectures")


def codename(os_release: Path) -> str:
    """Return this system's release name, e.g. ``bookworm``; raise LookupError where it has none."""
    match = re.search(r'^VERSION_CODENAME="?([a-z]+)"?$', os_release.read_text(), re.MULTILINE)
    if match is None:
        raise LookupError(f"{os_release} names no VERSION_CODENAME")
    return match[1]


def deb822_stanzas(text: str) -> Iterator[dict[str, str]]:
    """Yield each stanza of a ``.sources`` file; a folded value keeps its line breaks."""
    uncommented = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for block in re.split(r"\n\s*\n", uncommented):
        stanza: dict[str, str] = {}
        field = ""
        for line in block.splitlines():
            if line[:1].isspace() and field:
                stanza[field] += "\n" + line
            elif ":" in line:
                field, _, value = line.partition(":")
                stanza[field.strip()] = value.strip()
        if stanza:
            yield stanza


def one_line_stanzas(text: str) -> Iterator[dict[str, str]]:
    """Yield each ``deb`` line of a ``sources.list`` file as a stanza."""
    names = {"signed-by": "Signed-By", "trusted": "Trusted", "arch": "Architectures"}
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+(.+)", line.partition("#")[0])
        if match is None:
            continue
        options, uri, suite, components = match.groups()
        stanza = {"Types": "deb", "URIs": uri, "Suites": suite, "Components": components.strip()}
        for option in (options or "").split():
            key, _, value = option.partition("=")
            if key.lower() in names:
                stanza[names[key.lower()]] = value.replace(",", " ")
        yield stanza


def stanzas(apt_directory: Path) -> Iterator[dict[str, str]]:
    """Yield every configured source, in the order in which apt reads them."""
    parts = apt_directory / "sources.list.d"
    for path in (apt_directory / "sources.list", *sorted(parts.glob("*"))):
        if path.suffix == ".list" and path.is_file():
            yield from one_line_stanzas(path.read_text())
        elif path.suffix == ".sources" and path.is_file():
            yield from deb822_stanzas(path.read_text())


def for_suite(suite: str, apt_directory: Path, os_release: Path) -> str:
    """Return the stanza that brings ``suite`` from this system's own archive, or raise LookupError."""
    release = codename(os_release)
    for stanza in stanzas(apt_directory):
        is_binary = "deb" in stanza.get("Types", "").split()
        is_enabled = stanza.get("Enabled", "yes").lower() not in ("no", "false")
        has_release = not {release, *_ALIASES}.isdisjoint(stanza.get("Suites", "").split())
        if is_binary and is_enabled and has_release and "main" in stanza.get("Components", "").split():
            kept = {field: stanza[field] for field in _KEPT if field in stanza}
            fields = {"Types": "deb", "Suites": suite, "Components": "main", **kept}
            return "".join(f"{field}: {value}\n" for field, value in fields.items())
    raise LookupError(f"no apt source under {apt_directory} carries the main archive of {release}")


def main(arguments: list[str]) -> int:
    """Print the stanza, or say why there is none and return 1."""
    suite, apt_directory, os_release = (*arguments, *("", "/etc/apt", "/etc/os-release")[len(arguments) :])
    try:
        print(for_suite(suite, Path(apt_directory), Path(os_release)), end="")
    except (LookupError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
