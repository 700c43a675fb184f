"""`fairhearth config init`: write a settings file in which every key is explained and nothing is set.

Decides nothing: keys, defaults and meanings are the tables of docs/configuration.md, which is packaged too.
"""

from __future__ import annotations

import argparse
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from engine_service.commands.showing import EXIT_BAD, EXIT_OK, fail
from engine_service.scheduling.model import WorkloadClass
from engine_service.settings import FILE_NAME

DOCUMENT: Final = "configuration.md"
_WIDTH: Final = 100
_CLASSES: Final = "policy.classes.NAME"
_RESIDENTS: Final = "residents.ID"
_MODELS: Final = "models"
_HEADING: Final = re.compile(r"`\[\[?(?P<table>[\w.]+)\]\]?`")
_ROW: Final = re.compile(r"\| `(?P<key>\w+)` \| (?P<default>.*?) \| (?P<meaning>.*) \|$")

EXAMPLES: Final = {
    "server.token": '"at-least-16-characters-long"',
    "server.tokens": '[{ name = "kitchen-tablet", token = "another-16-characters", scopes = ["generate"] }]',
    "server.users": '{ "alice@example.org" = "alice" }',
    "server.announce": "true",
    "server.webhook_hosts": '["homeassistant.local"]',
    "server.webhook_secret": '"another-16-characters-or-more"',
    "server.tls_certificate": '"certificate.pem"',
    "server.tls_key": '"key.pem"',
    "model.path": '"models/some-model.gguf"',
    "model.threads": "4",
    "model.exllamav2.gpu_split": "[20.0, 20.0]",
    "model.exllamav2.draft_path": '"models/small-model"',
    "model.exllamav2.lora_paths": '["models/adapter"]',
    "model.exllamav3.gpu_split": "[20.0, 20.0]",
    "model.exllamav3.draft_path": '"models/small-model"',
    "models.name": '"coder"',
    "policy.time_zone": '"Europe/Berlin"',
    "residents.ID.name": '"Alice"',
    "residents.ID.daily_tokens": "200000",
    "residents.ID.rolling_tokens": "20000",
    "residents.ID.page_cap": "128",
    "residents.ID.max_running": "2",
    "paths.cache_dir": '"~/.cache/fairhearth"',
    "paths.state_dir": '"~/.local/state/fairhearth"',
    "paths.event_log": '"events.jsonl"',
}
"""What a key without a default could be set to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One row of the document's tables."""

    table: str  #: for example "policy.classes.NAME"
    name: str
    default: str  #: as it stands there
    meaning: str

    def value(self, index: int = 0) -> str:
        """Return a TOML value to show: the default, or an example; index counts the classes."""
        if self.table == _CLASSES and "," in self.default:
            value = self.default.split(",")[index].strip()
            return "false" if value == "none" else value
        if self.table == _CLASSES:
            return "false"
        if self.default.strip("`") == "none" and "`false`" in self.meaning:
            return "false"
        if self.default.startswith("`"):
            return self.default.strip("`")
        return EXAMPLES.get(f"{self.table}.{self.name}", "")


def document() -> str:
    """Return docs/configuration.md: from the package, or from the checkout that it runs in."""
    packaged = resources.files(__package__).joinpath(DOCUMENT)
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    return (Path(__file__).parents[2] / "docs" / DOCUMENT).read_text(encoding="utf-8")


def keys() -> Iterator[Key]:
    """Yield every key of every table of the settings file."""
    table = ""
    for line in document().splitlines():
        if found := _HEADING.search(line):
            table = found["table"]
        elif line.startswith("## "):
            table = ""
        elif table and (row := _ROW.match(line)):
            yield Key(table=table, name=row["key"], default=row["default"], meaning=row["meaning"])


def template() -> str:
    """Return the settings file in which everything is explained and nothing is set."""
    lines = [
        "# Settings of the Fairhearth engine. Everything is commented out and shows its default, or an",
        "# example. Take the # away from what you want different, then: fairhearth policy check",
    ]
    everything = list(keys())
    for table in dict.fromkeys(key.table for key in everything):
        rows = [key for key in everything if key.table == table]
        if table == _CLASSES:
            for index, class_id in enumerate(WorkloadClass):
                lines += ["", f"[policy.classes.{class_id.value}]"]
                lines += _described(rows, index) if not index else _bare(rows, index)
        elif table == _RESIDENTS:
            lines += [
                "",
                "# Everybody who lives here, by an id (here: alice); `guest` and `house` always exist.",
                "[residents]",
            ]
            lines += _described(rows, prefix="alice.")
        elif table == _MODELS:
            # Nothing of it can be taken over alone: it stands for the whole of [model].
            lines += ["", "# Several models, in place of [model]; each entry may have the keys of that, too."]
            lines += ["# [[models]]", *(re.sub("^#", "# ", line, count=1) for line in _bare(rows, 0))]
        else:
            lines += ["", f"[{table}]", *_described(rows)]
    return "\n".join(lines) + "\n"


def _described(rows: list[Key], index: int = 0, prefix: str = "") -> Iterator[str]:
    for key in rows:
        text = key.meaning.replace("`", "").replace("\\|", "|")
        yield from textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")
        yield from _bare([key], index, prefix)


def _bare(rows: list[Key], index: int, prefix: str = "") -> Iterator[str]:
    for key in rows:
        value = key.value(index)
        yield f"#{prefix}{key.name} = {value}" if value else f"# {key.name}: no default"


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `config init`; add makes a parser that knows the options of all commands."""
    config = add("config", help="make a settings file")
    actions = config.add_subparsers(dest="action", required=True)
    init = actions.add_parser("init", help="write a settings file that explains every key")
    init.add_argument(
        "file", nargs="?", type=Path, default=Path(FILE_NAME), metavar="FILE",
        help=f"where to (default: ./{FILE_NAME}; - for standard output)",
    )  # fmt: skip
    init.add_argument("--force", action="store_true", help="replace a file that is there")
    init.set_defaults(run=run_init)


def run_init(parsed: argparse.Namespace) -> int:
    """Run `fairhearth config init`."""
    path: Path = parsed.file
    if str(path) == "-":
        print(template(), end="")
        return EXIT_OK
    if path.is_dir():
        return fail(f"{path} is a folder; say what the file is to be called, for example {path / FILE_NAME}")
    try:
        # Tokens may be written into it: nobody else needs to read them.
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if parsed.force else os.O_EXCL)
        with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(template())
    except FileExistsError:
        return fail(f"{path} is there already; --force replaces it", EXIT_BAD)
    except OSError as error:
        return fail(f"{path} cannot be written: {error.strerror}", EXIT_BAD)
    print(f"{path} explains every key; take the # away from what you want different")
    print("then: fairhearth policy check")
    return EXIT_OK
