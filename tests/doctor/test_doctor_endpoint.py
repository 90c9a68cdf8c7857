"""Endpoint checks against scripted endpoints, the simulated server and closed doors: each fault is found."""

import contextlib
import datetime
import json
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from scripted_endpoint import Endpoint, listening

from lpxtop.config import Environment
from lpxtop.doctor import examine
from lpxtop.doctor.endpoint import is_garbage
from lpxtop.plan import Network, Plan, Prompts, Sampling, Secrets, Target

ROOT = Path(__file__).resolve().parents[2]


async def results(url: str, *, key: str | None = None, **plan) -> dict:
    """The endpoint's results by the end of their ids."""
    asked = Plan(target=Target(url=url, model=plan.pop("model", None)), **plan) if plan else None
    report = await examine(
        url, environment=Environment({}), secrets=Secrets(api_key=key), only=["endpoint"], plan=asked
    )
    return {check.id.removeprefix("endpoint."): check for check in report.checks}


async def of(endpoint: Endpoint, **settings) -> dict:
    async with listening(endpoint) as url:
        return await results(url, **settings)


def problems(found: dict) -> dict:
    return {name: check.status for name, check in found.items() if check.status in ("warn", "fail")}


async def test_a_sound_endpoint_passes():
    """Everything passes (TLS does not apply on loopback), with the figures that were asked for."""
    endpoint = Endpoint()

    found = await of(endpoint)

    assert {name for name, check in found.items() if check.status != "pass"} == {"tls"}
    assert found["answer"].evidence["text"] == "Paris"
    assert found["usage"].evidence == {"answer": 1, "stream": 20}
    assert found["metrics"].evidence["kind"] == "vllm"
    assert found["context"].evidence == {"context": 4096, "wanted": 256}
    asked = [json.loads(body) for path, _, body in endpoint.seen if path.endswith("completions")]
    assert {body["temperature"] for body in asked} == {0.0}


@pytest.mark.parametrize(
    ("change", "bad"),
    [
        ({"text": "!!!!!!!!!!!!!!!!!!!!"}, {"answer": "fail"}),
        ({"text": " "}, {"answer": "fail"}),
        ({"text": "A nice question about cheese"}, {"answer": "warn"}),
        ({"text": "", "reasoning": "The user asks for"}, {}),
        ({"held": True, "gap_s": 0.01}, {"stream": "fail"}),
        ({"streams": False}, {"stream": "fail"}),
        ({"usage": False}, {"usage": "warn"}),
        ({"extra_tokens": 100}, {"limit": "fail"}),
        ({"skew_s": 300.0}, {"clock": "warn"}),
        ({"skew_s": -300.0}, {"clock": "warn"}),
        ({"metrics": None}, {"metrics": "warn"}),
        ({"health": 503}, {"ready": "warn"}),
        ({"health": 404}, {}),
        ({"chat_status": 500}, {"answer": "fail", "ready": "fail"}),
        ({"models": [{"id": "m", "max_model_len": 200}]}, {"context": "fail"}),
        ({"models": [{"id": "m", "meta": {"n_ctx": 128}}]}, {"context": "fail"}),
    ],
)
async def test_one_fault_at_a_time(change, bad):
    """Each fault of an endpoint is found by its own check and by no other."""
    assert problems(await of(Endpoint(**change))) == bad


async def test_alive_is_not_ready():
    """A health path that says 200 while prompts fail is told as such."""
    found = await of(Endpoint(chat_status=500))

    assert found["ready"].text == "alive but not ready: /health 200, and a prompt fails"
    assert "engine is dead" in found["answer"].text


async def test_clock_skew_has_its_size():
    """300 s ahead is told within the header's second."""
    found = (await of(Endpoint(skew_s=300.0)))["clock"]

    assert found.evidence["skew_s"] == pytest.approx(300, abs=1.1)
    assert "ahead of" in found.text


@pytest.mark.parametrize(
    ("endpoint", "key", "status", "words"),
    [
        ({"key": "right-key-1"}, None, "fail", "the server wants a key"),
        ({"key": "right-key-1"}, "wrong-key-1", "fail", "the key is refused"),
        ({"key": "right-key-1"}, "right-key-1", "pass", "the key is accepted, and none is refused"),
        ({}, "useless-key", "warn", "without a key too"),
        ({"key": "right-key-1", "key_for_models": False}, "wrong-key-1", "fail", "key was refused"),
    ],
)
async def test_keys(endpoint, key, status, words):
    """Missing, wrong, right and needless keys are told apart; a key never stands in the report."""
    found = await of(Endpoint(**endpoint), key=key)

    assert found["auth"].status == status
    assert words in found["auth"].text
    assert key is None or key not in repr(found)
    if status == "fail":
        assert problems(found) == {"auth": "fail"}
        assert found["answer"].text == "the key decides (see endpoint.auth)"


async def test_a_model_that_is_not_served():
    """The asked model is not on the list: the list is told."""
    found = await of(Endpoint(), model="other", sampling=Sampling())

    assert found["models"].status == "fail"
    assert found["models"].evidence == {"models": ["m"]}


async def test_sizes_of_the_plan_are_judged():
    """4000 + 128 tokens do not fit 4096."""
    found = await of(Endpoint(), prompts=Prompts(tokens=4000))

    assert found["context"].text == "prompt 4000 + max tokens 128 is more than the context of 4096 tokens"


async def test_nothing_listens():
    """A closed port: TCP fails, the rest is skipped."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        found = await results(f"http://127.0.0.1:{port}")

    assert problems(found) == {"tcp": "fail"}
    assert "refused" in found["tcp"].text
    assert f"ss -ltnp | grep :{port}" in found["tcp"].advice


async def test_an_unknown_name():
    """A name without an address: DNS fails, the rest is skipped (.invalid never resolves, RFC 6761)."""
    found = await results("http://llm.invalid:8000")

    assert problems(found) == {"dns": "fail"}
    assert found["tcp"].status == "skip"


async def test_a_port_that_is_no_http_server():
    """Something that is not HTTP fails at the list of models and nowhere else."""

    async def shout(reader, writer):
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await writer.drain()
        writer.close()

    import asyncio

    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    found = await results(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()

    assert problems(found) == {"models": "fail"}


# --- TLS -----------------------------------------------------------------------------------------------------------


def secured(tmp_path: Path, days: float, name: str = "127.0.0.1") -> tuple[ssl.SSLContext, str]:
    """(a server's context, the authority's file) of a certificate that ends in so many days."""
    authority = trustme.CA()
    now = datetime.datetime.now(datetime.UTC)
    begin = now - datetime.timedelta(days=30)
    certificate = authority.issue_cert(name, not_before=begin, not_after=now + datetime.timedelta(days=days))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return context, str(tmp_path / "ca.pem")


@pytest.mark.parametrize(
    ("days", "name", "trusted", "status", "words"),
    [
        (90, "127.0.0.1", True, "pass", "good for 90 days"),
        (5.5, "127.0.0.1", True, "warn", "ends in 5 days"),
        (-1, "127.0.0.1", True, "fail", "certificate has expired"),
        (90, "10.0.0.9", True, "fail", "IP address mismatch"),
        (90, "127.0.0.1", False, "fail", "unable to get local issuer"),
    ],
)
async def test_certificates(tmp_path, days, name, trusted, status, words):
    """A good one, one about to end, an expired one, another host's, an unknown authority's."""
    context, authority = secured(tmp_path, days, name)
    network = Network(cacert=authority if trusted else None)
    async with listening(Endpoint(), context) as url:
        found = await results(url, network=network)

    assert found["tls"].status == status
    assert words in found["tls"].text
    assert problems(found) == ({} if status == "pass" else {"tls": status})


async def test_tls_to_a_plain_port():
    """https to a server that speaks http is told as that."""
    with simulated() as url:
        found = await results(url.replace("http:", "https:"))

    assert found["tls"].status == "fail"
    assert "does not speak TLS" in found["tls"].text


# --- the simulated server ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def simulated(*flags: str):
    process = subprocess.Popen(
        [sys.executable, "-m", "lpxtop.sim.server", "--port", "0", "--die-with-parent", *flags],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        yield process.stdout.readline().removeprefix("listening on ").strip()
    finally:
        process.terminate()
        process.wait(5)
        process.stdin.close()
        process.stdout.close()


@pytest.mark.parametrize(
    ("trouble", "bad"),
    [
        ({}, {"answer": "warn"}),
        ({"buffered": True}, {"answer": "warn", "stream": "fail"}),
        ({"loading_s": 60}, {"answer": "fail", "ready": "fail"}),
        ({"server_error_every": 1}, {"answer": "fail", "ready": "fail"}),
    ],
)
async def test_the_simulated_servers_troubles(trouble, bad):
    """Its words are random, which is only a warning; what it is told to do wrong is found."""
    with simulated("--trouble", json.dumps(trouble)) as url:
        assert problems(await results(url)) == bad


@pytest.mark.parametrize(
    ("text", "garbage"),
    [("Paris.", False), ("!!!!!!!!", True), ("the the the the the the the the the the", True),
     ("\ufffd\ufffd\ufffd", True), ("The capital of France is Paris, a city of about two million people.", False),
     ("42", False), ("巴黎", False), ("aaaaaaaaaaaaaaaa", True)],
)  # fmt: skip
def test_what_is_garbage(text, garbage):
    """Broken weights repeat themselves; short, foreign and numeric answers are no garbage."""
    assert is_garbage(text) is garbage
