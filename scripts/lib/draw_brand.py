"""Draws the integration's icons from brand/icon.svg with the system's Chromium. Needs .venv/browser.

Usage: .venv/browser/bin/python scripts/lib/draw_brand.py       from the repository's folder
"""

from __future__ import annotations

import sys
from pathlib import Path
from shutil import which

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "brand/icon.svg"
TARGET = ROOT / "custom_components/fairhearth/brand"

INK = {"": "#343a48", "dark_": "#e4e7ee"}
"""Colour of the lines by the beginning of the file's name; dark is for dark backgrounds."""


def main() -> int:
    """Draw every icon; return the exit code."""
    chromium = which("chromium") or which("chromium-browser") or which("google-chrome")
    if chromium is None:
        print("no Chromium was found on this system", file=sys.stderr)
        return 1
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for prefix, ink in INK.items():
            for suffix, size in (("", 256), ("@2x", 512)):
                draw(browser, ink, size, TARGET / f"{prefix}icon{suffix}.png")
        browser.close()
    return 0


def draw(browser: Browser, ink: str, size: int, file: Path) -> None:
    """Draw one icon, size pixels wide and high, on a transparent ground."""
    page = browser.new_page(viewport={"width": size, "height": size})
    style = f"margin:0;color:{ink}"
    page.set_content(f'<body style="{style}">{SOURCE.read_text(encoding="utf-8")}</body>')
    page.screenshot(path=file, omit_background=True)
    page.close()
    print(file)


if __name__ == "__main__":
    sys.exit(main())
