"""`lpxtop compare` from files to text and exit code."""

import json
import re
from pathlib import Path

import pytest
from compare_sessions import events, requests

from lpxtop import comparing
from lpxtop.errors import RecordingError, UsageError
from lpxtop.events import codec

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
SAMPLES = [str(RECORDINGS / name) for name in ("demo-incident.lpx.jsonl", "demo-slider-4-to-64.lpx.jsonl")]
LOAD = {"users": 4, "ttft_ms": 250.0, "gap_ms": 100.0, "tokens": 4, "tau_s": 0.7}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Recordings by name: two equal runs, one with 20 % more TTFT, and a short one."""
    folder = tmp_path_factory.mktemp("recordings")

    def write(name, seed, seconds, **how):
        made = events(requests(seed, seconds=seconds, **(LOAD | how)), seconds=seconds)
        path = folder / f"{name}.jsonl"
        path.write_bytes(b"".join(codec.encode(event) + b"\n" for event in made))
        return str(path)

    return {
        "a": write("a", 1, 240), "same": write("same", 2, 240), "slow": write("slow", 3, 240, ttft_ms=310.0),
        "short": write("short", 4, 10),
    }  # fmt: skip


def test_the_sample_recordings_are_not_comparable_and_say_why():
    """Two models on two GPUs: not comparable because of the model, exit 1, figures without verdicts."""
    text, code = comparing.run([SAMPLES[0]], [SAMPLES[1]])
    assert "not comparable because model differs (sim-small and sim-8b)" in text
    assert "GPUs: 1× SIM L4 24GB → 1× SIM H100 80GB" in text
    assert code == 1
    assert not any(word in text for word in ("worse", "better"))


def test_the_text_tells_errors_first_and_keeps_to_100_columns(recorded):
    """Errors come before any latency; the caveat of a single run is there; equal runs exit 0."""
    text, code = comparing.run([recorded["a"]], [recorded["same"]])
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert text.index("errors %") < text.index("TTFT p50")
    assert "single run: run-to-run noise not included" in text
    assert code == 0


@pytest.mark.parametrize(
    ("b", "gate", "state", "code"),
    [
        ("slow", "p50 ttft > +10%", "failed", 1),
        ("slow", "p50 ttft > +60%", "passed", 0),
        ("same", "p50 ttft > +10%", "passed", 0),
        ("slow", "p50 ttft > 280ms", "failed", 1),
        ("slow", "p50 itl > 280ms", "passed", 0),
        ("slow", "error_rate > +0.5%", "passed", 0),
        ("short", "p50 ttft > +10%", "unknown", 1),
        ("same", "energy_per_token_j > +10%", "unknown", 1),
    ],
)
def test_a_gate_decides_the_exit_code(recorded, b, gate, state, code):
    """A gate that failed, or could not be judged, is exit 1; one that held is 0."""
    text, got = comparing.run([recorded["a"]], [recorded[b]], output_format="json", fail_if=[gate])
    assert [outcome["state"] for outcome in json.loads(text)["gates"]] == [state]
    assert got == code


def test_the_json_has_the_documented_form(recorded):
    """Schema lpxtop.compare/1: comparable, differences, levels with metrics of key, a, b, difference, interval,
    verdict and why; and the same seed gives the same document."""
    once, _ = comparing.run([recorded["a"]], [recorded["slow"]], output_format="json", seed=3)
    again, _ = comparing.run([recorded["a"]], [recorded["slow"]], output_format="json", seed=3)
    assert once == again
    found = json.loads(once)
    assert found["schema"] == "lpxtop.compare/1"
    assert found["comparable"] is True
    level = found["levels"][0]
    assert level["concurrency"] == 8
    ttft = next(row for row in level["metrics"] if (row["key"], row["figure"]) == ("ttft", "p50"))
    assert ttft["verdict"] == "worse"
    assert ttft["interval_percent"][0] < ttft["difference_percent"] < ttft["interval_percent"][1]
    assert ttft["difference_percent"] == pytest.approx(100 * (ttft["b"] / ttft["a"] - 1))


def test_markdown_is_tables(recorded):
    """One table for the gates, one per level, every row with as many cells as its head."""
    text, _ = comparing.run([recorded["a"]], [recorded["slow"]], output_format="markdown", fail_if=["p50 ttft > +10%"])
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert any("TTFT p50 ms" in line and "worse" in line for line in tables)
    assert {line.count("|") for line in tables if "TTFT" in line} == {8}
    assert "| p50 ttft > +10% | 8 in flight | failed |" in text


def test_a_damaged_recording_is_compared_and_the_damage_is_told(recorded, tmp_path):
    """A torn recording: what is whole counts, and the notes say what is missing."""
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(Path(recorded["short"]).read_bytes()[:-200])
    text, _ = comparing.run([recorded["short"]], [str(torn)])
    assert "the recording has no end" in " ".join(text.split())


@pytest.mark.parametrize(
    ("a", "b", "fail_if", "says"),
    [
        ([], ["x"], [], "both sides"),
        (["x", "x"], ["y"], [], "given twice"),
        (["x"], ["x"], [], "given twice"),
        (["x"], ["y"], ["p95 ttft"], "is not [figure]"),
        (["x"], ["y"], ["mean ttft > +10%"], "mean is not compared"),
        (["x"], ["y"], ["requests_per_s < -5%"], "is not compared"),
    ],
)
def test_wrong_use_is_said_before_anything_is_read(a, b, fail_if, says):
    """No file is opened for a command that cannot be right."""
    with pytest.raises(UsageError, match=re.escape(says)):
        comparing.run(a, b, fail_if=fail_if)


def test_a_missing_file_is_named():
    """RecordingError with the path."""
    with pytest.raises(RecordingError, match="nowhere"):
        comparing.run(["nowhere.jsonl"], SAMPLES[:1])
