"""Take the pictures of docs/report.md: ``python bench/plots/report_picture.py``.

Trains ``tiny`` twice for a minute at most each, on data x tensor parallel ranks and on a pipeline,
makes the page of both with ``mcp-parallel report`` and photographs it in a headless browser: its
top to ``docs/report.png``, pipeline and layout, dark, to ``docs/report-layout.png``. ``--runs A B``
takes runs that are there. Cost: a minute or two on two quiet cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from browser import start_browser, why_no_browser  # noqa: E402

from mcp_parallel.cli.main import main as mcp_parallel  # noqa: E402

LAYOUTS = {
    "dp2-tp2": ("--dp", "2", "--tp", "2"),
    "pp2-zbv": ("--pp", "2", "--schedule", "zbv", "--micro-batch-size", "2"),
}
WIDTH, HEIGHT = 1400, 1500
SETTLE_S = 0.5


def train(root, steps):
    """The two run folders."""
    folders = []
    for name, flags in LAYOUTS.items():
        folders.append(root / name)
        command = (sys.executable, "-m", "mcp_parallel", "train", "--preset", "tiny", "--run-dir")
        validation = ("--set", "data.validation_share=0.01", "--set", "monitor.validate_every=20")
        options = ("--steps", str(steps), *validation)
        subprocess.run((*command, folders[-1], *flags, *options), check=True, cwd=ROOT)
    return folders


def photograph(page, picture):
    """The top of ``page``, with values read off its first chart; then its layouts, dark."""
    from selenium.webdriver import ActionChains

    with tempfile.TemporaryDirectory() as profile:
        driver = start_browser(profile, WIDTH, HEIGHT)
        try:
            driver.get(page.as_uri())
            plot = driver.find_element("css selector", ".chart .plot")
            ActionChains(driver).move_to_element(plot).pause(SETTLE_S).perform()
            driver.save_screenshot(str(picture))
            driver.find_element("id", "theme").click()
            driver.execute_script("document.getElementById('pipeline').scrollIntoView()")
            ActionChains(driver).pause(SETTLE_S).perform()
            driver.save_screenshot(str(picture.with_name(f"{picture.stem}-layout.png")))
        finally:
            driver.quit()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "report.png")
    args = parser.parse_args()
    if why_no_browser():
        parser.error(why_no_browser())
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        runs = args.runs or train(root, args.steps)
        page = root / "report.html"
        status = mcp_parallel(["report", *map(str, runs), "--out", str(page)])
        if status == 0:
            photograph(page, args.out)
            sys.stdout.write(f"pictures: {args.out} and one beside it\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
