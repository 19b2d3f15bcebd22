"""Install Debian's Chromium for the browser tests where it is missing: `python -m ...install`.

Needs root and apt. A machine where that fails still runs every other test; the browser tests then
fail and say what is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.report.browser import find

GET = ("apt-get", "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=300")
APT = (
    (*GET, "update", "-q"),
    (*GET, "install", "-y", "-q", "--no-install-recommends", "chromium", "fonts-dejavu-core"),
)


def main() -> int:
    try:
        find()
    except FileNotFoundError as error:
        print(error, flush=True)
    else:
        return 0
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return next((code for step in APT if (code := subprocess.run(step, env=env).returncode)), 0)


if __name__ == "__main__":
    sys.exit(main())
