"""The doctor against scripted drivers: the genuine binding loads a fake NVML library in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "probes" / "fake_nvml.c"
ASK = """
import asyncio, json, sys, msgspec
from pathlib import Path
from lpxtop.doctor.card import ask_nvml
from lpxtop.doctor.examine import HOST_CHECKS, _look
from lpxtop.doctor.node import Node, loader_complaint
answer = asyncio.run(ask_nvml(Path(sys.argv[1]), float(sys.argv[2])))
node = Node(root=Path(sys.argv[1]), nvml=answer, uid=1000, linker_says=loader_complaint)
found = {check.id: _look(check, node) for check in HOST_CHECKS if check.needs and node.lacks(check.needs) is None}
print(json.dumps({"state": answer.state, "checks": {name: [o.status, o.text] for name, o in found.items()}}))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the fake library."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux to build the fake NVML library")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wl,-soname,libnvidia-ml.so.1", "-o", folder / "libnvidia-ml.so.1", FAKE,
         "-lm", "-lpthread"],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture
def doctor(library: Path, tmp_path: Path):
    """Runs the GPU checks against a scenario: {"state": …, "checks": {id: [status, text]}}."""

    def ask(scenario: str, limit_s: float = 8.0) -> dict:
        (tmp_path / "scenario").write_text(scenario)
        root = tmp_path / "root"
        for address in ("0000:10:00.0", "0000:11:00.0"):
            device = root / "sys/bus/pci/devices" / address
            device.mkdir(parents=True)
            (device / "vendor").write_text("0x10de\n")
            (device / "class").write_text("0x030200\n")
        env = os.environ | {"PYTHONPATH": str(ROOT), "LPXTOP_FAKE_NVML": str(tmp_path / "scenario"),
                            "LD_LIBRARY_PATH": str(library)}  # fmt: skip
        command = [sys.executable, "-c", ASK, str(root), str(limit_s)]
        out = subprocess.run(command, env=env, capture_output=True, timeout=30, check=True)
        return json.loads(out.stdout)

    return ask


def faults(checks: dict) -> dict:
    """What concerns the GPUs and is no pass; this tree has no driver files."""
    files = ("driver.loaded", "dev.nodes")
    return {name: status for name, (status, _) in checks.items() if status in ("warn", "fail") and name not in files}


def test_two_healthy_cards(doctor):
    """Both open, nothing is wrong with them."""
    found = doctor("driver 570.86.15\ncuda 12080\ngpus 2\n")

    assert found["state"] == "joined"
    assert faults(found["checks"]) == {}
    assert found["checks"]["nvml.count"] == ["pass", "NVML opens all 2 GPU(s)"]
    assert found["checks"]["gpu.thermal"] == ["pass", "all 2 GPUs: 35 °C, 50 °C below the slowdown"]


def test_a_sick_card_beside_a_healthy_one(doctor):
    """Heat, a narrow link, memory errors, persistence off: each is found, on GPU 1 alone."""
    found = doctor(
        "gpus 2\ngpu 1 persistence=0 reasons=64 temp=91 margin=0 width=8 ecc_uncorrected=2 remap_failure=1 recovery=1 "
        "limit_mw=350000\n"
    )["checks"]

    assert faults(found) == {
        "gpu.persistence": "warn", "gpu.power.limit": "warn", "gpu.thermal": "fail", "gpu.throttle": "fail",
        "gpu.pcie": "warn", "gpu.ecc": "fail", "gpu.remap": "fail", "gpu.recovery": "fail",
    }  # fmt: skip
    assert all(found[name][1].startswith("GPU 1: ") for name in faults(found))


def test_driver_and_library_do_not_match(doctor):
    """NVML's code 18 is a mismatch, with no reading called a fault."""
    found = doctor("init 18\n")

    assert found["state"] == "unavailable"
    assert faults(found["checks"]) == {"driver.mismatch": "fail", "nvml.loadable": "fail"}


def test_one_card_of_two_is_gone(doctor):
    """A PCI card that NVML does not count is named."""
    found = doctor("gpus 1\n")["checks"]

    assert found["nvml.count"] == ["fail", "2 GPUs on the bus, 1 in NVML; missing: 0000:11:00.0"]


def test_a_hung_driver_costs_its_limit_only(doctor):
    """An initialisation that hangs: told as such, and the process ends at once."""
    begin = time.monotonic()

    found = doctor("delay_init 20000\n", limit_s=1.0)

    assert time.monotonic() - begin < 6
    assert found["checks"]["nvml.loadable"][0] == "fail"
    assert "did not answer within 1 s" in found["checks"]["nvml.loadable"][1]
