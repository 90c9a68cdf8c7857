"""The direction of imports, held by reading them: layers, single doors, and a load process without a screen."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lpxtop"

LAYERS = {
    "errors": 0, "clock": 0, "format": 0, "plan": 0,
    "events": 1,
    "config": 2, "planning": 2,
    "load": 3, "probes": 3, "recording": 3, "metrics": 3, "sim": 3,
    "workers": 4, "session": 4, "playback": 4, "figures": 4,
    "sweep": 5, "verify": 5, "doctor": 5,
    "tui": 6, "report": 6, "headless": 6, "comparison_report": 6,
    "demo": 7, "comparing": 7, "launch": 7, "replaying": 7, "cli": 7, "__main__": 7,
}  # fmt: skip
"""Layer of each module or package directly under lpxtop."""

SAME_LAYER = {
    ("config", "errors"), ("session", "workers"), ("planning", "config"), ("cli", "launch"), ("cli", "demo"),
    ("cli", "replaying"), ("cli", "comparing"), ("__main__", "cli"), ("replaying", "launch"),
}  # fmt: skip
"""Imports within a layer that are meant."""

DOORS = {
    "textual": {"tui"},
    "pynvml": {"probes/gpu.py", "probes/nvml.py"},
    "plotext": {"figures.py"},
    "httptools": {"load", "sim"},
    "aiofiles": {"recording/writer.py"},
    "httpx": {"load", "probes/server.py", "probes/dcgm.py", "doctor"},
    "click": {"cli.py", "launch.py", "headless.py", "replaying.py"},
}
"""Packages that only certain places may import."""


def modules() -> list[Path]:
    """Every module of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part(path: Path) -> str:
    """The module or package directly under lpxtop that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_its_own_package_and_lower_layers_only(path):
    """No import goes up, and packages of one layer do not know each other."""
    own = part(path)
    if own == "__init__":
        return
    for name in imports(path):
        if not name.startswith("lpxtop."):
            continue
        other = name.split(".")[1]
        if other in ("__version__", own):
            continue
        assert LAYERS[other] < LAYERS[own] or (own, other) in SAME_LAYER, f"{own} imports {name}"


@pytest.mark.parametrize("package", DOORS)
def test_a_dependency_has_its_door(package):
    """Only the named places import the package."""
    for path in modules():
        if any(name == package or name.startswith(package + ".") for name in imports(path)):
            where = str(path.relative_to(PACKAGE))
            assert any(where == door or where.startswith(door + "/") for door in DOORS[package]), where


def test_nobody_but_configuration_reads_the_environment():
    """os.environ and os.getenv occur in config.py alone (the terminal's own variables in tui/guard.py)."""
    allowed = {"config.py", "tui/guard.py"}
    found = {
        str(path.relative_to(PACKAGE))
        for path in modules()
        if "os.environ" in path.read_text() or "os.getenv" in path.read_text()
    }

    assert found <= allowed


def test_every_module_says_its_job():
    """Each module has a docstring."""
    silent = [
        str(path.relative_to(PACKAGE)) for path in modules() if not ast.get_docstring(ast.parse(path.read_text()))
    ]

    assert silent == []


def test_the_load_process_loads_no_screen():
    """Importing the worker brings in neither the screen nor NVML nor plotting."""
    heavy = "('textual','rich','pynvml','plotext','numpy')"
    code = f"import sys, lpxtop.load.worker; print([m for m in {heavy} if m in sys.modules])"

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)

    assert out.stdout.strip() == "[]"


def test_help_is_light():
    """`lpxtop --help` imports no heavy library."""
    code = (
        "import sys\nsys.argv=['lpxtop','--help']\nimport lpxtop.cli\n"
        "try: lpxtop.cli.main()\nexcept SystemExit: pass\n"
        "print([m for m in ('textual','rich','httpx','numpy','plotext','asyncio','msgspec') if m in sys.modules])"
    )

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)

    assert out.stdout.strip().splitlines()[-1] == "[]"
