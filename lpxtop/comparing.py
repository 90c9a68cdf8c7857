"""`lpxtop compare` without the command line: recordings in, a text and an exit code out. Must not send load."""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from lpxtop import comparison_report, format
from lpxtop.errors import EXIT_GATE_FAILED, EXIT_OK, UsageError
from lpxtop.metrics import comparability, gates
from lpxtop.metrics.compare import compare
from lpxtop.metrics.comparison import LATENCIES, Comparison, LevelResult, Row
from lpxtop.metrics.gates import Gate, Outcome
from lpxtop.metrics.samples import PERCENTILES, RunSample, Sampler
from lpxtop.recording.reader import Recording

OutputFormat = Literal["text", "markdown", "json"]
_RATES = ("error_rate", "output_tokens_per_s", "goodput", "energy_per_token_j")


def run(
    a_paths: Sequence[str],
    b_paths: Sequence[str],
    *,
    output_format: OutputFormat = "text",
    fail_if: Sequence[str] = (),
    seed: int = 0,
    meant: Collection[str] = (),
) -> tuple[str, int]:
    """Compare the recordings of side A with those of side B.

    Exit code 1 when they are not comparable, or a gate failed or could not be judged. `meant` names differences that
    shall not block (`model`, `max tokens` …: the names of the report). Raises UsageError for a bad gate or an empty
    side, RecordingError for what cannot be read.
    """
    parsed = [_gate(text) for text in fail_if]
    _check(a_paths, b_paths, meant)
    notes: list[str] = []
    a, b = ([sample(path, notes) for path in side] for side in (a_paths, b_paths))
    found = compare(a, b, seed=seed, meant=meant)
    outcomes = [outcome for gate in parsed for outcome in judge(gate, found)]
    passed = all(outcome.state == "passed" for outcome in outcomes)
    code = EXIT_OK if found.comparable and passed else EXIT_GATE_FAILED
    write = {
        "text": comparison_report.text, "markdown": comparison_report.markdown, "json": comparison_report.to_json,
    }  # fmt: skip
    return write[output_format](found, outcomes, notes), code


def _check(a_paths: Sequence[str], b_paths: Sequence[str], meant: Iterable[str]) -> None:
    if not a_paths or not b_paths:
        raise UsageError("a comparison needs recordings on both sides", "lpxtop compare A B, or A1 A2 … -- B1 B2 …")
    twice = set(a_paths) & set(b_paths) - {"-"}
    if twice or [*a_paths, *b_paths].count("-") > 1 or len({*a_paths}) + len({*b_paths}) < len([*a_paths, *b_paths]):
        name = min(twice, default="one recording")
        raise UsageError(f"{format.clean(name)} is given twice", "each run counts once; stdin can be only one of them")
    for name in meant:
        if name not in comparability.NAMES:
            raise UsageError(f"no difference is called {name!r}", f"known: {', '.join(comparability.NAMES)}")


def sample(path: str, notes: list[str]) -> RunSample:
    """One recording, folded. What is wrong with the file goes to `notes`."""
    recording = Recording.open(path)
    sampler = Sampler()
    for event in recording:
        sampler.apply(event)
    notes += [f"{format.clean(recording.name)}: {problem}" for problem in recording.problems]
    return sampler.sample(path)


# --- gates --------------------------------------------------------------------------------------------------------


def _gate(text: str) -> Gate:
    gate = gates.parse(text)
    if gate.key not in (*LATENCIES, *_RATES):
        raise UsageError(
            f"gate {gate.text!r}: {gate.key} is not compared", f"compared are {', '.join((*LATENCIES, *_RATES))}"
        )
    if gate.figure is not None and gate.figure not in PERCENTILES:
        raise UsageError(f"gate {gate.text!r}: {gate.figure} is not compared", f"compared are {', '.join(PERCENTILES)}")
    return gate


def judge(gate: Gate, found: Comparison) -> list[Outcome]:
    """One outcome per level; a single unknown where there is nothing to judge."""
    if not found.comparable:
        return [Outcome(gate=gate.text, state="unknown", text=f"not comparable: {found.reasons[0]}")]
    rows = [(level, row) for level in found.levels for row in level.rows if (row.key, row.figure) == _wanted(gate)]
    if not rows:
        return [Outcome(gate=gate.text, state="unknown", text=f"{gate.key} was not measured")]
    return [_outcome(gate, level, row) for level, row in rows]


def _wanted(gate: Gate) -> tuple[str, str | None]:
    return gate.key, gate.figure


def _outcome(gate: Gate, level: LevelResult, row: Row) -> Outcome:
    name = comparison_report.load(level.load)
    if not gate.relative:
        if row.b is None:
            return Outcome(gate=gate.text, state="unknown", text=row.why, level=name)
        value = comparison_report.value(row, row.b, unit=True)
        return Outcome(gate=gate.text, state="failed" if gate.holds(row.b) else "passed", text=value, level=name)
    if row.interval is None or row.difference is None:
        return Outcome(gate=gate.text, state="unknown", text=row.why, level=name)
    low, high = (100 * edge for edge in row.interval)
    text = f"{comparison_report.change(row)} {comparison_report.interval(row)}"
    if gate.proven(low, high):
        return Outcome(gate=gate.text, state="failed", text=text, level=name)
    beyond = gate.holds(100 * row.difference)
    return Outcome(gate=gate.text, state="passed", text=f"{text}, not proven" if beyond else text, level=name)
