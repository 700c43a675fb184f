"""Opens pages of Home Assistant in the system's Chromium, does what a person would, and photographs them.

Runs in the browser environment, alone, and needs nothing of the household package: it is started as a file.
Reads one JSON object from standard input:

    {"url", "tokens", "pages": [{"path", "file", "width", "height", "scheme", "language", "steps", "clip"}]}

`scheme` is light or dark. `steps` are lists: ["wait", SELECTOR], ["gone", SELECTOR], ["click", SELECTOR],
["fill", SELECTOR, TEXT], ["focus", SELECTOR], ["press", KEY], ["focused", SELECTOR], or ["settle"], which
gives animations time. Selectors are Playwright's and see through shadow roots. `clip` is the selector of the
only part to keep, or null for the whole page; `file` is null where no picture is wanted.

Writes one JSON object a page to standard output: {"file", "errors"}, errors being what the page logged as an
error or threw. A step that cannot be done ends the program with exit code 2 and a line that says which.
"""

from __future__ import annotations

import json
import sys
import time
from shutil import which
from typing import Any, Final

from playwright.sync_api import Browser, ConsoleMessage, Error, Page, sync_playwright

SETTLE_MS: Final = 3000
TIMEOUT_MS: Final = 90_000
PHONE_WIDTH: Final = 600


def main() -> int:
    """Open every page; return the exit code."""
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
            for wanted in order["pages"]:
                report = visit(browser, order["url"], order["tokens"], wanted)
                print(json.dumps(report), flush=True)
        except Error as error:
            print(str(error).partition("\nCall log")[0], file=sys.stderr)
            return 2
        finally:
            browser.close()
    return 0


def visit(browser: Browser, url: str, tokens: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Open one page as a signed-in user, take every step, photograph it; return the report."""
    is_phone = wanted["width"] < PHONE_WIDTH
    context = browser.new_context(
        viewport={"width": wanted["width"], "height": wanted["height"]},
        color_scheme=wanted["scheme"],
        locale="en-US",
        reduced_motion="reduce",
        is_mobile=is_phone,
        has_touch=is_phone,
    )
    kept = {
        "hassTokens": json.dumps(_stored(url, tokens)),
        "selectedLanguage": json.dumps(wanted["language"]),
    }
    if not is_phone:
        kept["dockedSidebar"] = '"always_hidden"'
    context.add_init_script(
        f"for (const [key, value] of Object.entries({json.dumps(kept)})) localStorage.setItem(key, value);"
    )
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    errors: list[str] = []
    page.on("console", lambda message: _note(errors, message))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url + wanted["path"])
    for step in wanted["steps"]:
        try:
            take(page, step)
        except Error as error:
            raise Error(
                f"{wanted['path']}: {step}: {error.message}; so far the page said: {errors}"
            ) from error
    if wanted["file"]:
        target = page.locator(wanted["clip"]) if wanted["clip"] else page
        target.screenshot(path=wanted["file"])
    context.close()
    return {"file": wanted["file"], "errors": errors}


def take(page: Page, step: list[str]) -> None:
    """Do one thing on the page; raise Playwright's Error where it cannot be done in time."""
    match step:
        case ["wait", selector]:
            page.locator(selector).first.wait_for()
        case ["gone", selector]:
            page.locator(selector).first.wait_for(state="detached")
        case ["click", selector]:
            page.locator(selector).first.click()
        case ["fill", selector, text]:
            page.locator(selector).first.fill(text)
        case ["focus", selector]:
            page.locator(selector).first.focus()
        case ["press", key]:
            page.keyboard.press(key)
        case ["focused", selector]:
            page.locator(f"{selector}:focus").first.wait_for()
        case ["settle"]:
            page.wait_for_timeout(SETTLE_MS)
        case _:
            raise ValueError(f"unknown step: {step}")


def _note(errors: list[str], message: ConsoleMessage) -> None:
    if message.type == "error":
        errors.append(f"{message.text} ({message.location.get('url')})")


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
