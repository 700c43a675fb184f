"""Photographs pages of Home Assistant in the system's Chromium. Runs in the browser environment, alone.

Reads one JSON object from standard input: {"url", "tokens", "pages": [{"path", "file", "width", "height",
"scheme", "wait_for"}]}. Needs nothing of the household package: it is started as a file.
"""

import json
import sys
import time
from shutil import which
from typing import Any

from playwright.sync_api import Browser, sync_playwright

SETTLE_MS = 4000
TIMEOUT_MS = 60_000


def main() -> int:
    """Take every picture; return the exit code."""
    order = json.load(sys.stdin)
    chromium = which("chromium") or which("chromium-browser") or which("google-chrome")
    if chromium is None:
        print("no Chromium was found on this system", file=sys.stderr)
        return 1
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        try:
            for page in order["pages"]:
                photograph(browser, order["url"], order["tokens"], page)
                print(page["file"], flush=True)
        finally:
            browser.close()
    return 0


def photograph(browser: Browser, url: str, tokens: dict[str, Any], order: dict[str, Any]) -> None:
    """Take one picture as a signed-in user, once the page shows what is waited for."""
    context = browser.new_context(
        viewport={"width": order["width"], "height": order["height"]},
        color_scheme=order["scheme"],
        locale="en-US",
        reduced_motion="reduce",
        is_mobile=order["width"] < 600,
        has_touch=order["width"] < 600,
    )
    context.add_init_script(
        f"localStorage.setItem('hassTokens', {json.dumps(json.dumps(_stored(url, tokens)))});"
    )
    if order["width"] >= 600:
        context.add_init_script("localStorage.setItem('dockedSidebar', '\"always_hidden\"');")
    page = context.new_page()
    page.goto(url + order["path"])
    page.wait_for_selector(order["wait_for"], timeout=TIMEOUT_MS)
    page.wait_for_timeout(SETTLE_MS)
    page.screenshot(path=order["file"])
    context.close()


def _stored(url: str, tokens: dict[str, Any]) -> dict[str, Any]:
    """Return what the frontend keeps in the browser after somebody signed in."""
    return {
        "access_token": tokens["access_token"],
        "token_type": "Bearer",
        "expires_in": tokens["expires_in"],
        "hassUrl": url,
        "clientId": f"{url}/",
        "expires": int(time.time() * 1000) + tokens["expires_in"] * 1000,
        "refresh_token": tokens["refresh_token"],
    }


if __name__ == "__main__":
    sys.exit(main())
