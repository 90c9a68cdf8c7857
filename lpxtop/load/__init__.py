"""The load process: everything that sends requests and stamps what comes back. Never imports a UI."""

import sys

# `import httpx` brings its own command line along, and with it rich and pygments where they are installed: 40 ms and
# several MB that a load process has no use for. None makes that import fail, which httpx provides for.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
