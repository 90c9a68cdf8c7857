"""The exposition parser: what the two text formats allow, what servers really write, and how fast it is."""

import math
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpxtop.probes import canonical, concepts
from lpxtop.probes.exposition import Parser

FIXTURES = Path(__file__).parent / "fixtures"


def parse(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Everything, as (name, labels) -> value."""
    found = Parser(lambda _: True).parse(text)
    return {(series.name, tuple(sorted(series.labels.items()))): value for series, value in found.items()}


def test_plain_lines():
    """With and without labels, timestamps, tabs, spaces, a trailing comma, CRLF."""
    found = parse(
        '# HELP a Help.\n# TYPE a counter\na 1\nb{} 2.5\nc{x="1",} 3 1700000000000\nd\t4\ne{ x = "1" , y="2" }\t5\n'
        'f{x="1"} 6\r\n\n  \n'
    )
    assert found == {
        ("a", ()): 1.0, ("b", ()): 2.5, ("c", (("x", "1"),)): 3.0, ("d", ()): 4.0,
        ("e", (("x", "1"), ("y", "2"))): 5.0, ("f", (("x", "1"),)): 6.0,
    }  # fmt: skip


def test_labels_with_escapes_and_braces():
    """Quotes, backslashes, newlines, braces, hashes and commas inside a value."""
    found = parse('a{p="C:\\\\x\\n\\"q\\"",q="} # {,"} 7\na{p="é"} 8\n')
    assert found == {("a", (("p", 'C:\\x\n"q"'), ("q", "} # {,"))): 7.0, ("a", (("p", "é"),)): 8.0}


def test_values_that_are_no_numbers():
    """NaN and infinities are values; words are damage."""
    parser = Parser(lambda _: True)
    values = {series.name: value for series, value in parser.parse("a NaN\nb +Inf\nc -Inf\nd 1e3\ne x\nf\n").items()}
    assert math.isnan(values.pop("a"))
    assert values == {"b": math.inf, "c": -math.inf, "d": 1000.0}
    assert parser.damaged == 2


def test_openmetrics():
    """Exemplars after a value, float timestamps, `# EOF`."""
    found = parse(
        '# TYPE a counter\na_total{x="1"} 17.0 1700000000.123 # {trace_id="} 5"} 0.67 1700000000.0\n'
        'h_bucket{le="0.1"} 3 # {trace_id="abc"} 0.05\nb_total 9 # {} 1\n# EOF\n'
    )
    assert found == {("a_total", (("x", "1"),)): 17.0, ("h_bucket", (("le", "0.1"),)): 3.0, ("b_total", ()): 9.0}


def test_only_what_is_wanted():
    """The filter sees each exposed name once; unwanted lines may be as damaged as they like."""
    seen: list[str] = []
    parser = Parser(lambda name: seen.append(name) or name == "a")
    for _ in range(2):
        assert [s.name for s in parser.parse('a{x="1"} 1\na{x="2"} 2\nb{x= 3\nc 4\n')] == ["a", "a"]
    assert sorted(seen) == ["a", "b", "c"]
    assert parser.damaged == 0


def test_a_series_keeps_its_number():
    """Numbers are the series', whatever the order of the lines."""
    parser = Parser(lambda _: True)
    first = {s.text: s.number for s in parser.parse('a{x="1"} 1\na{x="2"} 2\n')}
    second = {s.text: s.number for s in parser.parse('b 0\na{x="2"} 5\na{x="1"} 4\n')}
    assert first == {'a{x="1"}': 0, 'a{x="2"}': 1}
    assert second == {'a{x="1"}': 0, 'a{x="2"}': 1, "b": 2}


NAMES = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,8}", fullmatch=True)
LABELS = st.dictionaries(st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,5}", fullmatch=True), st.text(max_size=8), max_size=3)


def written(name: str, labels: dict[str, str], value: float) -> str:
    """As the format's documentation says it is written."""
    escapes = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
    pairs = ",".join(f'{label}="{text.translate(escapes)}"' for label, text in labels.items())
    return f"{name}{'{' + pairs + '}' if labels else ''} {value!r}\n"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(NAMES, LABELS, st.floats(allow_nan=False)), max_size=6))
def test_what_is_written_is_read(samples):
    """Any names, labels and values survive; of a series that occurs twice the last counts."""
    expected = {(name, tuple(sorted(labels.items()))): value for name, labels, value in samples}
    assert parse("".join(written(*sample) for sample in samples)) == expected


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_no_text_crashes_it(text):
    """Whatever a server sends."""
    Parser(lambda _: True).parse(text)


def test_half_a_megabyte_in_ten_milliseconds():
    """The best of ten scrapes of 0.5 MB (a real vLLM's text for a dozen engines), read to concepts, takes < 10 ms."""
    lines = (FIXTURES / "vllm-0.32-metrics.txt").read_text().splitlines()
    text = ""
    for engine in range(12):
        text += "".join(line.replace('engine="0"', f'engine="{engine}"') + "\n" for line in lines)
    assert len(text) > 500_000
    table = concepts.load()
    parser = Parser(concepts.Keep(table))
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        reading = canonical.read(parser.parse(text), table.servers["vllm"], table)
        times.append(time.perf_counter() - begin)
    assert reading.concepts["output_tokens"] == 12 * 264
    assert min(times) < 0.010, [f"{1000 * t:.1f} ms" for t in times]


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.txt")), ids=lambda path: path.stem)
def test_fixtures_have_no_damage(path):
    """Every line of every fixture is understood."""
    parser = Parser(lambda _: True)
    count = sum(bool(line) and line[0] != "#" for line in path.read_text().splitlines())
    assert len(parser.parse(path.read_text())) == count
    assert parser.damaged == 0
