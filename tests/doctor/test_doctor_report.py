"""The command as a whole on this machine, its three outputs, its choice of checks, and its time limits."""

import json
import time

import pytest

from lpxtop.config import Environment
from lpxtop.doctor import examine, report_json, report_markdown, report_text, run
from lpxtop.doctor import examine as doctor_examine
from lpxtop.doctor.results import Report, Result
from lpxtop.errors import UsageError


def result(name: str, status: str, text: str, advice: str = "") -> Result:
    return Result(
        id=name, title=f"Title of {name}", source="here", status=status, text=text, advice=advice, evidence={}
    )


SICK = Report(
    host="node\x1b[31m7",
    url="http://a:1/v1",
    checks=(
        result("gpu.present", "pass", "1 NVIDIA GPU(s)"),
        result("driver.mismatch", "fail", "kernel module and NVML library do not match: " + "word " * 30, "reboot"),
        result("gpu.thermal", "warn", "GPU 1: 88 °C", "airflow"),
        result("gpu.mig", "skip", "not told"),
        result("gpu.ecc", "skip", "not told"),
        result("gpu.xid", "skip", "the kernel log cannot be read", "sudo dmesg -T | grep -i xid"),
        result("endpoint.answer", "pass", "“Paris” \x1b]0;x\x07 in 1 s"),
    ),
)


def test_text_is_aligned_and_narrow():
    """At most 80 columns, a status word each, advice indented, equal skips in one line, no control characters."""
    lines = report_text(SICK).splitlines()

    assert max(map(len, lines)) <= 80
    assert "\x1b" not in report_text(SICK)
    assert "      > reboot" in lines
    assert "SKIP  2 checks            not told (gpu.*)" in lines
    assert "      > sudo dmesg -T | grep -i xid" in lines
    assert lines[-1] == "2 pass, 1 warn, 1 fail, 3 skip"


def test_json_has_the_schema():
    """The schema's fields, statuses in small letters, and sums that agree."""
    data = json.loads(report_json(SICK))

    assert data["schema"] == "lpxtop.doctor/1"
    assert data["summary"] == {"pass": 2, "warn": 1, "fail": 1, "skip": 3}
    assert data["checks"][1]["id"] == "driver.mismatch"
    assert {"id", "status", "text", "advice"} <= set(data["checks"][0])


def test_markdown_is_a_checklist():
    """What passed is ticked, the rest is open and says why; nothing is taken for markup."""
    text = report_markdown(SICK)

    assert "- [x] Title of gpu.present (`gpu.present`): 1 NVIDIA GPU(s)" in text
    assert "- [ ] **FAIL** Title of driver.mismatch" in text
    assert "  - reboot" in text
    assert "\x1b" not in text


def test_exit_codes():
    """1 when something failed, else 0: neither a warning nor a skip fails a script."""
    assert SICK.exit_code == 1
    assert Report(checks=tuple(c for c in SICK.checks if c.status != "fail")).exit_code == 0


def test_this_machine_has_no_false_fault(tmp_path):
    """Here no GPU is a SKIP with advice, and only true faults are FAIL."""
    text, code = run(None, environment=Environment({"XDG_STATE_HOME": str(tmp_path)}), output_format="json")
    checks = {check["id"]: check for check in json.loads(text)["checks"]}

    assert not any("itself failed" in check["text"] for check in checks.values())
    if checks["gpu.present"]["status"] == "skip":
        assert {c["id"] for c in checks.values() if c["status"] == "fail"} <= {"sys.nofile"}
        assert checks["driver.loaded"]["text"] == "no NVIDIA GPU here"
        assert code == (1 if checks["sys.nofile"]["status"] == "fail" else 0)
    assert not any(name.startswith("endpoint.") for name in checks)


@pytest.mark.parametrize(
    ("only", "skip", "ids"),
    [
        (["sys.shm"], [], {"sys.shm"}),
        (["plat"], [], {"plat.wsl", "plat.jetson"}),
        (["plat.*,sys.shm"], ["plat.wsl"], {"plat.jetson", "sys.shm"}),
    ],
)
async def test_only_and_skip(only, skip, ids):
    """Ids, areas and lists choose; nothing else runs."""
    report = await examine(None, environment=Environment({}), only=only, skip=skip)

    assert {check.id for check in report.checks} == ids


async def test_an_unknown_id_is_a_usage_error():
    """A misspelled id is told with the areas there are."""
    with pytest.raises(UsageError, match="--only gpus") as caught:
        await examine(None, environment=Environment({}), only=["gpus"])

    assert "endpoint" in caught.value.hint


async def test_a_check_that_hangs_costs_its_limit_only(monkeypatch):
    """A file that blocks for ever is a SKIP after the limit, and the report comes."""
    import sys
    import threading

    from lpxtop.doctor.results import Check, passed

    module = sys.modules["lpxtop.doctor.examine"]
    gate = threading.Event()
    stuck = Check("sys.shm", "t", "/proc/stuck", "r", lambda node: (gate.wait() and passed("late")) or passed("late"))
    monkeypatch.setattr(module, "CHECK_S", 0.2)
    monkeypatch.setattr(module, "HOST_CHECKS", (stuck,))
    begin = time.monotonic()

    report = await doctor_examine(None, environment=Environment({}), only=["sys.shm"])
    gate.set()

    assert time.monotonic() - begin < 2
    assert (report.checks[0].status, report.checks[0].text) == (
        "skip",
        "did not end within 0.2 s: /proc/stuck does not answer",
    )


def test_a_bad_format_is_a_usage_error():
    """Only three formats."""
    with pytest.raises(UsageError, match="no format"):
        run(None, environment=Environment({}), output_format="xml", only=["plat"])
