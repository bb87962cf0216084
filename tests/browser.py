"""A headless Chromium that looks at a page."""

from __future__ import annotations

import importlib.util
import os
import shutil

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def why_no_browser():
    """What to install, or None where there is a browser and what drives it."""
    if importlib.util.find_spec("selenium") is None:
        return "no selenium: pip install 'mcp-kernels[test]'"
    if _browser() is None or shutil.which("chromedriver") is None:
        return "no browser: apt-get install chromium chromium-driver"
    return None


def _browser():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


def start_browser(profile, width=1280, height=900):
    """A driver whose browser keeps everything in the folder ``profile``."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = _browser()
    for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # What a browser keeps beside its profile (fonts, settings) stays in the profile's folder too.
    homes = {name: str(profile) for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    homes["TMPDIR"] = "/tmp"  # of a socket, whose path has 108 bytes at most
    service = webdriver.ChromeService(shutil.which("chromedriver"), env={**os.environ, **homes})
    return webdriver.Chrome(options, service)
