"""Headless Chromium, where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Without these Chromium looks for updates and accounts, and without a sandbox it runs as root in a container.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=2000",
)


@dataclass(frozen=True)
class Shown:
    dom: str
    console: list[str]


def find() -> str | None:
    """CHROMIUM names one that is not on the path."""
    named = os.environ.get("CHROMIUM")
    return next((found for name in (named, *NAMES) if name and (found := shutil.which(name))), None)


def show(page: Path, folder: Path, *more: str) -> Shown:
    chromium = find()
    assert chromium is not None
    flags = [*FLAGS, *more, f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    command = [chromium, *flags, page.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, encoding="utf-8", check=True)
    return Shown(done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line])
