"""Every trouble switch, as a client meets it and as the log tells it."""

import asyncio
import json
import socket
import time

import httpx
import pytest
from sim_process import get, server, stream, truth, wait_for

from lpxtop.sim.http import HttpRequest
from lpxtop.sim.presets import SimConfig
from lpxtop.sim.server import SimServer


def ask(url, **fields):
    body = {"model": "sim-8b", "max_tokens": 6, "ignore_eos": True, "messages": [{"role": "user", "content": "hi"}]}
    return httpx.post(f"{url}/v1/chat/completions", json=body | fields, timeout=10, headers={"x-request-id": "mine"})


def set_trouble(url, **trouble):
    return httpx.post(f"{url}/sim/trouble", json=trouble)


@pytest.fixture(scope="module")
def url():
    """One server whose trouble each test sets at run time."""
    with server() as address:
        yield address


def outcomes(url, last):
    return [record["outcome"] for record in truth(url)[-last:]]


def generated(url) -> float:
    return sum(
        float(line.rpartition(" ")[2])
        for line in get(f"{url}/metrics").decode().splitlines()
        if line.startswith("vllm:generation_tokens_total")
    )


async def test_a_stall_is_silence_after_the_third_token_and_stays_one_in_the_log(url):
    """Three tokens, then nothing; when the client gives up the outcome is still `stall`."""
    set_trouble(url, stall_every=1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream(url), 0.7)
    set_trouble(url)
    await asyncio.sleep(0.1)

    (record,) = truth(url)[-1:]
    assert (record["outcome"], record["tokens"]) == ("stall", 3)


async def test_a_cut_stream_ends_without_done(url):
    """Three tokens, then the end of the connection: no usage, no [DONE]."""
    set_trouble(url, cut_every=1)
    got = await stream(url)
    set_trouble(url)

    assert len(got.tokens) == 3
    assert not got.done
    assert outcomes(url, 1) == ["cut"]


async def test_an_error_inside_a_stream_is_an_object_and_done(url):
    """Three tokens, an error object in a 200, [DONE]."""
    set_trouble(url, error_every=1)
    got = await stream(url)
    set_trouble(url)

    assert got.head.startswith("HTTP/1.1 200")
    assert len(got.tokens) == 3
    assert got.events[-1][1]["error"]["code"] == 500
    assert got.done
    assert outcomes(url, 1) == ["error"]


async def test_tokens_that_were_not_sent_are_not_counted(url):
    """Counters and log agree in bad weather too: 3 + 3 + 6 tokens."""
    before = generated(url)
    set_trouble(url, cut_every=1)
    await stream(url)
    set_trouble(url, error_every=1)
    await stream(url)
    set_trouble(url)
    await stream(url)

    assert generated(url) - before == 12 == sum(record["tokens"] for record in truth(url)[-3:])


async def test_a_buffering_proxy_sends_everything_at_the_end(url):
    """With ten slow tokens, head and all chunks come together, after the last one."""
    set_trouble(url, buffered=True)
    got = await stream(url, max_tokens=40)
    set_trouble(url)

    first, last = got.events[0][0], got.events[-1][0]
    assert len(got.tokens) == 40
    assert last - first < 50e6  # 40 steps take at least 260 ms
    assert got.done


async def test_a_slow_head_comes_in_pieces_and_loses_nothing(url):
    """The head takes 7 pauses of 50 ms; every chunk follows in order, and the connection can be used again."""
    set_trouble(url, slow_head_every=1)
    begin = time.monotonic()
    got = await stream(url)
    took = time.monotonic() - begin
    with httpx.Client() as client:
        body = {"model": "sim-8b", "stream": True, "max_tokens": 3, "ignore_eos": True, "prompt": "x"}
        twice = [client.post(f"{url}/v1/completions", json=body).text for _ in range(2)]
    set_trouble(url)

    assert got.head.startswith("HTTP/1.1 200 OK\r\nserver: lpxtop-sim/")
    assert len(got.tokens) == 6
    assert got.usage["completion_tokens"] == 6
    assert 0.35 <= took < 1.5
    assert all(text.endswith("data: [DONE]\n\n") and text.count('"text":"') == 3 for text in twice)


async def test_a_delay_comes_before_the_head(url):
    """200 ms until the first byte, which a healthy stream sends at once."""
    healthy = time.monotonic()
    await stream(url, max_tokens=1)
    healthy = time.monotonic() - healthy
    set_trouble(url, delay_ms=200)
    slow = time.monotonic()
    await stream(url, max_tokens=1)
    slow = time.monotonic() - slow
    set_trouble(url)

    assert healthy < 0.15
    assert 0.2 <= slow < 0.5


def test_the_head_of_a_stream_comes_before_its_first_token():
    """As on a real server the head says `accepted`, half a second before the first token here."""
    with server("--engine", '{"step_base_s": 0.5}') as url, httpx.Client() as client:
        body = {"model": "sim-8b", "stream": True, "max_tokens": 1, "prompt": "x"}
        begin = time.monotonic()
        with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            head = time.monotonic() - begin
            answer.read()
        whole = time.monotonic() - begin

    assert head < 0.3
    assert whole >= 0.5


def test_every_nth_request_is_limited_or_fails():
    """429 with Retry-After and our id for every second, 500 for every third; the rest is served."""
    with server("--trouble", '{"rate_limit_every": 2, "server_error_every": 3}') as url:
        answers = [ask(url) for _ in range(4)]
        logged = outcomes(url, 4)

    assert [answer.status_code for answer in answers] == [200, 429, 500, 429]
    assert answers[1].headers["retry-after"] == "1"
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine"] * 4
    assert logged == ["ok", "http_429", "http_500", "http_429"]


def test_loading_counts_from_when_it_is_set(url):
    """503 for 0.3 s from now, although the server has been up for longer; then it serves."""
    set_trouble(url, loading_s=0.3)
    loading = ask(url).status_code, httpx.get(f"{url}/health").status_code
    wait_for(lambda: httpx.get(f"{url}/health").status_code == 200, 2)

    assert loading == (503, 503)
    assert ask(url).status_code == 200


def test_trouble_is_shown_and_a_mistake_in_it_changes_nothing(url):
    """GET shows what is on; a misspelt or negative switch is refused and the old one stays."""
    set_trouble(url, delay_ms=1)
    misspelt, negative = set_trouble(url, cut_evry=2), set_trouble(url, cut_every=-1)
    shown = httpx.get(f"{url}/sim/trouble").json()
    set_trouble(url)

    assert (misspelt.status_code, negative.status_code) == (400, 400)
    assert "cut_evry" in misspelt.json()["error"]["message"]
    assert (shown["delay_ms"], shown["cut_every"]) == (1.0, 0)


class Kept:
    """A responder that keeps what it was told."""

    def json(self, status, value, **headers):
        self.status, self.value = status, value


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_trouble_is_made_from_this_machine_only(method):
    """A request from elsewhere is refused, and nothing changes."""
    sim, kept = SimServer(SimConfig()), Kept()
    sim.handle(HttpRequest(method=method, path="/sim/trouble", headers={}, body=b'{"cut_every":1}', local=False), kept)

    assert kept.status == 403
    assert sim.trouble.cut_every == 0


async def test_a_client_that_leaves_while_its_request_is_delayed_never_reaches_the_engine():
    """The request is aborted, not computed."""
    with server("--trouble", '{"delay_ms": 300}') as url:
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({"model": "sim-8b", "stream": True, "max_tokens": 9, "prompt": "x"}).encode()
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            wait_for(lambda: truth(url))
        outcome = wait_for(lambda: (found := truth(url)[0]["outcome"]) != "running" and found)
        tokens = generated(url)

    assert outcome == "abort"
    assert tokens == 0
