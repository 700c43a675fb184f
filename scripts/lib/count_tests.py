"""Print how many tests of a pytest report passed, failed and were skipped; zeros without a report.

Usage: count_tests.py REPORT.xml
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def counts(report: Path) -> tuple[int, int, int]:
    """Return (passed, failed, skipped); a test whose set-up or tear-down broke has failed."""
    try:
        suites = list(ElementTree.parse(report).iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return 0, 0, 0
    total, failures, errors, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    # A test that passed and broke in its tear-down is reported once, as an error.
    return max(0, total - failures - errors - skipped), failures + errors, skipped


if __name__ == "__main__":
    print(*counts(Path(sys.argv[1])))
