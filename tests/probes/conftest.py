"""The fake NVML library, compiled once per set of missing symbols, and scenarios run against it."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lpxtop.events import codec
from lpxtop.events.records import AnyEvent, Gpu, Mark, Source

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@dataclass
class Outcome:
    """What a scenario gave: events, the library's log of calls, and how long leaving took."""

    events: list[AnyEvent]
    calls: list[tuple[str, int, float, int]]
    stderr: str
    leaving_s: float
    code: int
    samples: list[Gpu] = field(init=False)
    sources: list[Source] = field(init=False)
    marks: list[Mark] = field(init=False)

    def __post_init__(self) -> None:
        self.samples = [event for event in self.events if isinstance(event, Gpu)]
        self.sources = [event for event in self.events if isinstance(event, Source)]
        self.marks = [event for event in self.events if isinstance(event, Mark)]

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The inventory."""
        return next(source for source in self.sources if source.descriptor).descriptor["gpus"]

    def called(self, symbol: str, gpu: int | None = None) -> list[tuple[str, int, float, int]]:
        return [call for call in self.calls if call[0] == symbol and (gpu is None or call[1] == gpu)]


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Path]:
    """The directory of a library that lacks the given symbols."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux to build the fake NVML library")
    made: dict[tuple[str, ...], Path] = {}

    def build(missing: tuple[str, ...] = ()) -> Path:
        if missing not in made:
            made[missing] = folder = tmp_path_factory.mktemp("nvml")
            hidden = f"local: {'; '.join(missing)};" if missing else ""
            (folder / "map").write_text(f"{{ global: nvml*; {hidden} }};")
            subprocess.run(
                [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-fvisibility=hidden",
                 "-Wl,-soname,libnvidia-ml.so.1", f"-Wl,--version-script={folder / 'map'}",
                 "-o", folder / "libnvidia-ml.so.1", HERE / "fake_nvml.c", "-lm", "-lpthread"],
                check=True, capture_output=True,
            )  # fmt: skip
        return made[missing]

    return build


@pytest.fixture(scope="session")
def oldest_binding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the oldest nvidia-ml-py that pyproject.toml allows."""
    folder = tmp_path_factory.mktemp("binding")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--disable-pip-version-check",
        "--target",
        folder,
    ]
    try:
        done = subprocess.run([*command, "nvidia-ml-py==12.535.108"], capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("nvidia-ml-py 12.535.108 could not be fetched in time")
    if done.returncode:
        pytest.skip("nvidia-ml-py 12.535.108 cannot be installed here (offline, or no pip)")
    return folder


@pytest.fixture
def scenario(fake_library: Callable[..., Path], tmp_path: Path) -> Callable[..., Outcome]:
    """Runs a GpuSource in a process of its own against a scripted driver."""

    def run(
        text: str, *, samples: int = 4, seconds: float = 8.0, hz: float = 100.0, select: str | None = None,
        visible: str | None = None, missing: tuple[str, ...] = (), files: dict[str, str] | None = None,
        constants: dict[str, float] | None = None, binding: Path | None = None, library: bool = True,
    ) -> Outcome:  # fmt: skip
        script, log, root = tmp_path / "scenario.txt", tmp_path / "log.txt", tmp_path / "root"
        script.write_text(text)
        log.write_text("")
        root.mkdir(exist_ok=True)
        for name, content in ({"proc/meminfo": MEMINFO} | (files or {})).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        options = {"samples": samples, "seconds": seconds, "hz": hz, "select": select, "visible": visible,
                   "root": str(root), "constants": {"COST_SHARE": 100.0} | (constants or {})}  # fmt: skip
        path = os.pathsep.join([*([str(binding)] if binding else []), str(ROOT)])
        env = os.environ | {"PYTHONPATH": path, "LPXTOP_FAKE_NVML": str(script), "LPXTOP_FAKE_NVML_LOG": str(log)}
        if library:
            env["LD_LIBRARY_PATH"] = str(fake_library(missing))
        child = subprocess.run(
            [sys.executable, HERE / "probe_child.py", json.dumps(options)], env=env, capture_output=True, timeout=40
        )
        ended = time.monotonic()
        lines = child.stdout.splitlines()
        left = [float(line[2:]) for line in lines if line.startswith(b"# ")]
        events = [codec.decode(line) for line in lines if not line.startswith(b"# ")]
        calls = [line.split() for line in log.read_text().splitlines()]
        return Outcome(
            events,
            [(name, int(gpu), float(at), int(code)) for name, gpu, at, code in calls],
            child.stderr.decode(),
            ended - left[0] if left else -1.0,
            child.returncode,
        )

    return run


MEMINFO = "MemTotal:       527935000 kB\nMemFree:        100000000 kB\nMemAvailable:   400000000 kB\n"
