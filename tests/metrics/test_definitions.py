"""The table of definitions, by hand."""

import pytest

from lpxtop.errors import UsageError
from lpxtop.events.records import Finished
from lpxtop.metrics import definitions
from lpxtop.metrics.definitions import BY_KEY

OK = Finished(
    t=0, id=1, slot=0, due=1_000, sent=3_000, outcome="ok", first_event_us=80_000, first_token_us=100_000,
    first_reasoning_us=100_000, first_content_us=400_000, last_token_us=1_100_000, end_us=1_200_000, chunks=51,
    first_chunk_tokens=1, output_tokens=101, input_tokens=10, token_source="continuous_usage",
)  # fmt: skip


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("ttft", 100.0), ("ttft_due", 102.0), ("ttft_any", 80.0), ("ttfo", 400.0),
        ("tpot", 10.0),  # 1 000 ms over 100 tokens after the first
        ("e2e", 1100.0),  # the last token, not the stream's end
        ("schedule_delay", 2.0), ("tokens_per_s_per_user", 100.0),
        ("request_tokens_per_s", 91.818),  # 101 tokens in 1.1 s
    ],
)  # fmt: skip
def test_formula_of_one_request(key: str, expected: float) -> None:
    """Each per-request row gives the value worked out by hand."""
    assert BY_KEY[key].value(OK) == expected


def test_first_chunk_of_many_tokens_is_not_in_tpot() -> None:
    """With n₁ = 21 the 80 tokens after it took the second: 12.5 ms each."""
    request = Finished(
        t=0, id=1, slot=0, due=0, sent=0, outcome="ok", first_token_us=100_000, last_token_us=1_100_000,
        output_tokens=101, first_chunk_tokens=21,
    )  # fmt: skip
    assert BY_KEY["tpot"].value(request) == 12.5


def test_a_single_token_has_no_tpot() -> None:
    """Output no longer than the first chunk: tpot is not defined, not 0."""
    request = Finished(
        t=0, id=1, slot=0, due=0, sent=0, outcome="ok", first_token_us=5000, last_token_us=5000, output_tokens=1
    )
    assert BY_KEY["tpot"].value(request) is None
    assert BY_KEY["tokens_per_s_per_user"].value(request) is None
    assert BY_KEY["e2e"].value(request) == 5.0


def test_without_streaming_only_the_whole_wait_is_defined() -> None:
    """No first token: no ttft and no tpot; e2e goes to the end of the answer."""
    request = Finished(t=0, id=1, slot=0, due=0, sent=0, outcome="ok", end_us=2_000_000, output_tokens=50)
    values = {key: BY_KEY[key].value(request) for key in ("ttft", "ttfo", "tpot", "e2e", "request_tokens_per_s")}
    assert values == {"ttft": None, "ttfo": None, "tpot": None, "e2e": 2000.0, "request_tokens_per_s": 25.0}


def test_a_request_never_sent_has_no_times() -> None:
    """Nothing but the fact that it failed."""
    request = Finished(t=0, id=1, slot=0, due=0, outcome="connect_error")
    assert all(row.value(request) is None for row in definitions.PER_REQUEST)


def test_reasoning_only_has_no_ttfo() -> None:
    """An answer that never left its reasoning has no first output token."""
    request = Finished(t=0, id=1, slot=0, due=0, sent=0, outcome="ok", first_token_us=9, first_reasoning_us=9)
    assert BY_KEY["ttfo"].value(request) is None


@pytest.mark.parametrize("outcome", ["ok", "cut", "cancelled"])
def test_no_failures(outcome: str) -> None:
    """What was answered, cut by the end of the run or cancelled is not the server's fault."""
    assert not definitions.failed(Finished(t=0, id=1, slot=0, due=0, outcome=outcome))


@pytest.mark.parametrize("outcome", ["not_streamed", "stall", "rate_limited", "http_5xx", "empty", "something_new"])
def test_failures(outcome: str) -> None:
    """Every other outcome is an error, also one of a newer version."""
    assert definitions.failed(Finished(t=0, id=1, slot=0, due=0, outcome=outcome))


def test_every_key_of_the_design_has_a_row() -> None:
    """The keys that the design's table and the summary's JSON name are explained."""
    named = {
        "ttft", "ttft_due", "ttft_any", "ttfo", "icl", "itl", "tpot", "e2e", "schedule_delay", "output_tokens_per_s",
        "tokens_per_s_per_user", "request_tokens_per_s", "input_tokens_per_s", "tokens_per_s_per_gpu",
        "energy_per_token_j", "goodput", "error_rate", "attainment", "total_tokens_per_s", "requests_per_s",
        "utilization_percent", "memory_used_bytes", "power_watts", "sm_clock_mhz", "temperature_c", "energy_j",
        "throttled", "read_delay", "coalesced_ratio", "loop_lag", "client_cpu_ratio",
    }  # fmt: skip
    assert named <= set(BY_KEY)
    assert len(BY_KEY) == len(definitions.TABLE)


def test_explain_says_formula_unit_and_population() -> None:
    """`lpxtop explain tpot` holds what an argument about the number needs."""
    told = definitions.explain("TPOT")
    assert "(aₘ − a₁) / (output tokens − n₁)" in told
    assert "(ms)" in told
    assert "outcome ok" in told
    assert all(row.key in definitions.explain() for row in definitions.TABLE)


def test_an_unknown_key_offers_the_nearest() -> None:
    """A slip of the finger gets a hint, not a stack trace."""
    with pytest.raises(UsageError) as error:
        definitions.explain("ttfd")
    assert "ttft" in error.value.hint
