"""SLO terms: parsing and meeting them."""

import pytest

from lpxtop.errors import UsageError
from lpxtop.events.records import Finished
from lpxtop.metrics import slo


def request(ttft_ms: int | None = 100, tokens: int = 11, last_ms: int = 600, outcome: str = "ok") -> Finished:
    return Finished(
        t=0, id=1, slot=0, due=0, sent=0, outcome=outcome, first_token_us=None if ttft_ms is None else ttft_ms * 1000,
        last_token_us=None if ttft_ms is None else last_ms * 1000, output_tokens=tokens, chunks=tokens,
    )  # fmt: skip


def test_terms_and_their_units() -> None:
    """Seconds and milliseconds both end as ms; spaces and the ≤ sign are allowed."""
    terms = slo.parse("ttft<500ms, TPOT <= 0.05s,e2e≤5s,tokens_per_s_per_user>20")
    assert [(term.key, term.op, term.limit) for term in terms] == [
        ("ttft", "<", 500.0), ("tpot", "<=", 50.0), ("e2e", "<=", 5000.0), ("tokens_per_s_per_user", ">", 20.0)
    ]  # fmt: skip
    assert [str(term) for term in terms][:2] == ["ttft<500ms", "tpot<=50ms"]


def test_written_terms_read_back() -> None:
    """What the header holds is what was asked."""
    terms = slo.parse("ttft<0.5s,request_tokens_per_s>=12.5")
    assert slo.parse(",".join(map(str, terms))) == terms


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ttft<500", "unit"), ("ttft=500ms", "comparison"), ("tttf<5ms", "tttf"), ("ttft<5kg", "unit"),
        ("icl<5ms", "icl"), ("tokens_per_s_per_user>20ms", "tok/s"), ("ttft<", "ttft<"),
    ],
)  # fmt: skip
def test_mistakes_are_named(text: str, named: str) -> None:
    """The message shows the term and what is wrong with it."""
    with pytest.raises(UsageError) as error:
        slo.parse(text)
    assert named in str(error.value)


def test_every_term_must_hold() -> None:
    """TTFT 100 ms and 50 ms per token: met below those limits, not at them."""
    assert slo.meets(slo.parse("ttft<101ms,tpot<51ms"), request())
    assert not slo.meets(slo.parse("ttft<101ms,tpot<50ms"), request())
    assert slo.meets(slo.parse("ttft<=100ms"), request())


def test_a_failed_request_meets_nothing() -> None:
    """However fast its first token was."""
    assert not slo.meets(slo.parse("ttft<1s"), request(outcome="truncated"))


def test_what_does_not_exist_is_not_met() -> None:
    """An ok answer without a first token has no ttft and misses the objective."""
    assert not slo.meets(slo.parse("ttft<1s"), request(ttft_ms=None))


def test_a_one_token_answer_does_not_miss_tpot() -> None:
    """It has no token after the first that could have been late."""
    assert slo.meets(slo.parse("tpot<50ms,ttft<1s"), request(tokens=1, last_ms=100))
