"""The path of a Chromium for the tests of the inspector. As a script it installs Debian's, where it may."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome")
LACKING = f"NO BROWSER: install chromium, or name one in PERDURE_CHROMIUM (looked for {', '.join(NAMES)})"


def found() -> str | None:
    """Return the browser that PERDURE_CHROMIUM names, or one of the usual names."""
    return os.environ.get("PERDURE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def install() -> None:
    """Install Debian's package, if this user may. Its downloads can take a minute."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    print("Installing Chromium for the tests of the inspector.", flush=True)
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "chromium"]):
        subprocess.run(["apt-get", *words], env=quiet, stdout=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    if found() is None:
        install()
    if found() is None:
        print(f"{LACKING}. The inspector is not tested in one.", file=sys.stderr)
