"""The system's own Debian source, in either format, is found and pointed at another suite."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "lib" / "debian_source.py"


@pytest.fixture
def apt(tmp_path: Path) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "os-release").write_text('ID=debian\nVERSION_CODENAME="bookworm"\n')
    return tmp_path


def source_for_forky(apt: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "forky", str(apt), str(apt / "os-release")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_deb822_source_keeps_its_mirror_and_key(apt: Path) -> None:
    (apt / "sources.list.d" / "debian.sources").write_text(
        "# a comment\n"
        "Types: deb deb-src\n"
        "# another one\n"
        "URIs: http://mirror.example/debian\n"
        "Suites: bookworm bookworm-updates\n"
        "Components: main contrib\n"
        "Signed-By: /usr/share/keyrings/debian.gpg\n"
        "\n"
        "Types: deb\n"
        "URIs: http://mirror.example/debian-security\n"
        "Suites: bookworm-security\n"
        "Components: main\n"
    )
    assert source_for_forky(apt).stdout.splitlines() == [
        "Types: deb",
        "Suites: forky",
        "Components: main",
        "URIs: http://mirror.example/debian",
        "Signed-By: /usr/share/keyrings/debian.gpg",
    ]


def test_a_key_written_inside_the_source_keeps_its_lines(apt: Path) -> None:
    stanza = "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm\nComponents: main\n"
    key = "\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQINBF\n -----END PGP PUBLIC KEY BLOCK-----"
    (apt / "sources.list.d" / "debian.sources").write_text(stanza + f"Signed-By:{key}\n")
    assert source_for_forky(apt).stdout.endswith(f"Signed-By: {key}\n")


def test_a_one_line_source_keeps_its_options(apt: Path) -> None:
    (apt / "sources.list").write_text(
        "# deb http://old.example/debian bookworm main\n"
        "deb-src http://mirror.example/debian bookworm main\n"
        "deb http://mirror.example/debian-security bookworm-security main\n"
        "deb [arch=amd64,arm64 signed-by=/etc/debian.gpg] http://mirror.example/debian/ bookworm main\n"
    )
    assert source_for_forky(apt).stdout.splitlines() == [
        "Types: deb",
        "Suites: forky",
        "Components: main",
        "URIs: http://mirror.example/debian/",
        "Signed-By: /etc/debian.gpg",
        "Architectures: amd64 arm64",
    ]


def test_a_source_that_is_switched_off_is_passed_over(apt: Path) -> None:
    stanza = "Types: deb\nURIs: http://{}.example/debian\nSuites: bookworm\nComponents: main\n"
    (apt / "sources.list.d" / "a.sources").write_text("Enabled: no\n" + stanza.format("off"))
    (apt / "sources.list.d" / "b.sources").write_text(stanza.format("on"))
    assert "URIs: http://on.example/debian" in source_for_forky(apt).stdout


def test_without_a_source_of_this_release_the_error_names_the_release(apt: Path) -> None:
    (apt / "sources.list").write_text("deb http://mirror.example/other trixie main\n")
    answer = source_for_forky(apt)
    assert answer.returncode == 1
    assert "carries the main archive of bookworm" in answer.stderr
