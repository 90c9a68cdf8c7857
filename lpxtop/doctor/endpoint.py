"""Checks of an endpoint, judged by the facts of one visit. Must not send anything.

HTTP 200 proves nothing: the answer's text, its stream, its counts and its clock are what is looked at.
"""

import ipaddress
import re
from typing import Any

from lpxtop.config import is_loopback
from lpxtop.doctor.prompting import ANSWER_TOKENS, EXPECTED, Reply
from lpxtop.doctor.results import Check, Outcome, failed, noted, passed, skipped, warned
from lpxtop.doctor.visit import Visit
from lpxtop.format import clean, latency

EXPIRES_SOON_DAYS = 14
SKEW_S = 2.0
FAR_MS = 100.0
LATE_SHARE = 0.9
"""A first token after this share of the whole answer's time is no stream to a reader."""
LEAST_TO_JUDGE = 8
_CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length")


def dns(visit: Visit) -> Outcome:
    if visit.name_problem:
        return failed(f"the name {visit.host} is not known: {visit.name_problem}",
                      f"getent hosts {visit.host}; is it spelled right, does this host have DNS?")  # fmt: skip
    return passed(f"{visit.host} is {', '.join(visit.addresses[:4])}", addresses=visit.addresses)


def tcp(visit: Visit) -> Outcome:
    if visit.name_problem:
        return skipped("the name is not known (see endpoint.dns)")
    problems = "; ".join(f"{address}: {why}" for address, why in visit.dial_problems.items())
    evidence = {"problems": visit.dial_problems}
    if not visit.dials:
        refused = set(visit.dial_problems.values()) == {"refused"}
        advice = f"ss -ltnp | grep :{visit.port} there: does the server run, and listen beyond 127.0.0.1?" if refused \
            else "a firewall or a route in between: try from the server's own host"  # fmt: skip
        return failed(f"no connection to port {visit.port} ({problems})", advice, **evidence)
    if problems:
        ways = f"{len(visit.dials)} of {len(visit.addresses)} addresses"
        return warned(f"only {ways} connect ({problems})", "clients that try the others first wait", **evidence)
    return passed(f"port {visit.port} connects on {', '.join(visit.dials)}", **evidence)


def tls(visit: Visit) -> Outcome:
    if not visit.is_tls:
        if is_loopback(visit.host):
            return skipped("plain http on this host")
        if visit.secrets.api_key:
            return warned(f"the key goes to {visit.host} over plain http", "put TLS in front (a reverse proxy)")
        return noted("plain http: whoever is on the path can read prompts", "TLS in front, if the network is shared")
    if visit.tls_problem:
        return failed(visit.tls_problem, f"openssl s_client -connect {visit.host}:{visit.port} </dev/null; --cacert "
                      "FILE trusts its authority")  # fmt: skip
    expires = visit.tls.get("expires_s")
    if visit.plan.network.insecure or expires is None:
        return warned(f"{visit.tls.get('version')}, the certificate is not checked (--insecure)", "--cacert FILE")
    days = (expires - visit.tls["seen_s"]) / 86400
    if days < EXPIRES_SOON_DAYS:
        return warned(f"the certificate ends in {days:.0f} days", "renew it", days=round(days, 1))
    return passed(f"{visit.tls['version']}, certificate good for {days:.0f} days", days=round(days, 1))


def models(visit: Visit) -> Outcome:
    status, names = visit.models_status, [clean(str(model["id"]), 80) for model in visit.models]
    if status is None:
        return failed(visit.models_problem or "no HTTP answer", "is it the right port, and http or https?")
    if status in (401, 403):
        return skipped("the key decides (see endpoint.auth)")
    if status == 503:
        return failed(f"not ready: HTTP 503 {visit.models_problem}".rstrip(), "it is loading its model: wait, then "
                      "look at its log")  # fmt: skip
    if not names:
        if visit.model is not None:
            return warned(
                f"no list of models (HTTP {status})", "many clients ask for it; is the base URL right (…/v1)?"
            )
        return failed(f"no list of models (HTTP {status}) {visit.models_problem}".rstrip(), "is the base URL right "
                      "(…/v1)? Name the model with -m")  # fmt: skip
    asked = visit.plan.target.model
    if asked is not None and asked not in names and f"{asked}:latest" not in names:
        return failed(f"{asked} is not served; it serves {', '.join(names[:6])}", "choose one with -m", models=names)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return passed(f"serves {', '.join(names[:4])}{more}", models=names)


def auth(visit: Visit) -> Outcome:
    with_key, without = visit.models_status, visit.keyless_status
    has_key = bool(visit.secrets.api_key or visit.secrets.headers)
    if with_key in (401, 403):
        if not has_key:
            return failed(f"the server wants a key (HTTP {with_key})", "set LPXTOP_API_KEY, or --api-key-env NAME")
        return failed(f"the key is refused (HTTP {with_key})", "is it this server's key, and does it still hold?")
    if visit.refusal and re.search(r"HTTP 40[13]", visit.refusal[0]):
        return failed(*visit.refusal)
    open_ = without == 200 if has_key else with_key == 200
    if not has_key:
        if open_ and not _is_private(visit):
            return warned("answers anyone on the internet, without a key", "start it with --api-key, or a gateway")
        return passed("no key is asked for")
    if open_:
        return warned("lists its models without a key too: is a key asked for at all?", "start it with its api-key "
                      "setting (vLLM: VLLM_API_KEY)")  # fmt: skip
    return passed("the key is accepted" + (", and none is refused" if without in (401, 403) else ""))


def _is_private(visit: Visit) -> bool:
    """Whether every known address is of a private network; a proxy hides the addresses."""
    try:
        return all(ipaddress.ip_address(a.partition("%")[0]).is_private for a in visit.addresses or [visit.host])
    except ValueError:
        return False


# --- answers -------------------------------------------------------------------------------------------------------


def answer(visit: Visit) -> Outcome:
    if visit.refusal is not None:
        return failed(visit.refusal[0], visit.refusal[1] or "look at the server's log")
    reply = visit.answer
    if reply is None:
        return skipped("no prompt was sent (see endpoint.models)")
    if not reply.ok:
        return failed(f"a short prompt fails: {reply.problem}", "lpxtop explain 'THE ERROR'; the server's log")
    return _judged(reply)


def _judged(reply: Reply) -> Outcome:
    """Empty and broken texts are faults; an odd one is a question for a person."""
    text = clean(reply.text, 60)
    evidence = {"text": clean(reply.text, 200), "finish": reply.finish, "seconds": reply.end_s}
    if not reply.text.strip():
        if reply.reasoning.strip():
            return passed(f"it reasons; no answer yet within {ANSWER_TOKENS} tokens", **evidence)
        return failed("HTTP 200 and an empty answer", "chat template, stop tokens, or a broken model file", **evidence)
    if is_garbage(reply.text):
        return failed(f"the answer is garbage: “{text}”", "wrong quantisation, kernel or model file: compare with "
                      "lpxtop verify against a known good endpoint", **evidence)  # fmt: skip
    took = latency(reply.end_s * 1000 if reply.end_s is not None else None)
    if EXPECTED not in (reply.text + reply.reasoning).lower():
        return warned(f"it answers “{text}”, which does not name the capital of France",
                      "a very small or a base model may; otherwise look at the chat template", **evidence)  # fmt: skip
    return passed(f"“{text}” in {took}", **evidence)


def is_garbage(text: str) -> bool:
    """Whether a text is what broken weights or kernels give: one character or word over and over, or no characters."""
    dense = "".join(text.split())
    if "\ufffd" * 2 in dense or not any(character.isalnum() for character in dense):
        return True
    if len(dense) >= 12 and max(dense.count(character) for character in set(dense)) >= 0.8 * len(dense):
        return True
    words = text.lower().split()
    return len(words) >= 10 and max(words.count(word) for word in set(words)) >= 0.8 * len(words)


def streaming(visit: Visit) -> Outcome:
    reply = visit.stream
    if reply is None or reply.end_s is None:
        return skipped("no streamed answer")
    if not reply.streamed:
        return failed("a stream was asked for and one piece came", "users see nothing until the end; does a gateway "
                      "change the request?")  # fmt: skip
    tokens = reply.output_tokens if reply.output_tokens is not None else len(reply.text) // 4
    evidence: dict[str, Any] = {
        "reads": len(reply.reads),
        "first_s": reply.reads[0] if reply.reads else None,
        "end_s": reply.end_s,
    }
    if tokens < LEAST_TO_JUDGE or not reply.reads:
        return skipped(f"the answer is too short to tell ({tokens} tokens)", **evidence)
    late = reply.reads[0] >= LATE_SHARE * reply.end_s
    # a fast server's few tokens may come in one packet: only a first token that came late was held back
    if len(reply.reads) == 1 or (late and len(reply.reads) < tokens / 4):
        return failed(f"{tokens} tokens came in {len(reply.reads)} piece(s), the first after "
                      f"{latency(reply.reads[0] * 1000)} of {latency(reply.end_s * 1000)}",
                      "a proxy buffers: nginx proxy_buffering off; X-Accel-Buffering: no; no gzip on event streams",
                      **evidence)  # fmt: skip
    return passed(f"{tokens} tokens in {len(reply.reads)} reads, the first after {latency(reply.reads[0] * 1000)} "
                  f"of {latency(reply.end_s * 1000)}", **evidence)  # fmt: skip


def usage(visit: Visit) -> Outcome:
    assert visit.stream is not None
    whole = visit.answer.output_tokens if visit.answer else None
    streamed = visit.stream.output_tokens
    evidence = {"answer": whole, "stream": streamed}
    if streamed is None:
        where = "in streams" if whole is not None else "at all"
        return warned(f"the server counts no tokens {where}", "throughput is then counted in chunks; a newer server "
                      "takes stream_options.include_usage", **evidence)  # fmt: skip
    return passed(f"{streamed} output tokens counted by the server", **evidence)


def limit(visit: Visit) -> Outcome:
    replies = [
        reply for reply in (visit.answer, visit.stream) if reply and reply.ok and reply.output_tokens is not None
    ]
    over = [reply for reply in replies if reply.output_tokens is not None and reply.output_tokens > reply.limit]
    if not replies:
        return skipped("without counted tokens this cannot be told")
    if over:
        return failed(
            f"asked for at most {over[0].limit} tokens, got {over[0].output_tokens}",
            "the limit is ignored: one user can hold the GPU; is max_completion_tokens the name it knows?",
        )
    return passed(f"answers stay within the limit ({', '.join(f'{r.output_tokens} of {r.limit}' for r in replies)})")


def context(visit: Visit) -> Outcome:
    wanted = visit.plan.prompts.tokens + visit.plan.sampling.max_tokens
    row = next((m for m in visit.models if m["id"] == visit.model), visit.models[0] if len(visit.models) == 1 else {})
    length = _context_length(row)
    if length is None:
        return skipped("the server does not tell the model's context length")
    sizes = f"prompt {visit.plan.prompts.tokens} + max tokens {visit.plan.sampling.max_tokens}"
    if wanted > length:
        return failed(f"{sizes} is more than the context of {length} tokens", "--prompt-tokens, --max-tokens, or a "
                      "larger --max-model-len at the server", context=length, wanted=wanted)  # fmt: skip
    return passed(f"{sizes} fits the context of {length} tokens", context=length, wanted=wanted)


def _context_length(row: dict[str, Any]) -> int | None:
    meta = row.get("meta")
    places = [row.get(name) for name in _CONTEXT_FIELDS]
    places.append(meta.get("n_ctx") if isinstance(meta, dict) else None)
    return next(
        (value for value in places if isinstance(value, int) and not isinstance(value, bool) and value > 0), None
    )


# --- around it -----------------------------------------------------------------------------------------------------


def readiness(visit: Visit) -> Outcome:
    """Liveness says that a process listens, readiness that it answers; probes of orchestrators mix them up."""
    told = {path: status for path, status in visit.health.items() if status is not None and status not in (404, 405)}
    alive = any(status == 200 for status in told.values())
    ready = visit.answer is not None and visit.answer.ok
    words = ", ".join(f"{path} {status}" for path, status in told.items()) or "no health path"
    evidence = {"health": visit.health, "answers": ready}
    if ready and told and not alive:
        return warned(f"it answers prompts, and its health path says no ({words})", "an orchestrator would take it out "
                      "of service: point its probe elsewhere", **evidence)  # fmt: skip
    if not ready and alive:
        return failed(f"alive but not ready: {words}, and a prompt fails", "a readiness probe must send a real prompt; "
                      "see endpoint.answer", **evidence)  # fmt: skip
    if not ready:
        return failed(f"not ready ({words})", "see endpoint.answer", **evidence)
    return passed(f"ready: a prompt is answered; live: {words}", **evidence)


def metrics(visit: Visit) -> Outcome:
    found = visit.metrics
    if found.url is not None:
        kind = found.kind or "a server that is not in the table"
        return passed(f"{kind} at {found.url}", url=found.url, kind=found.kind)
    text = f"no server metrics ({found.problem or 'none found'})"
    if not _is_private(visit):
        return skipped(f"{text}; usual for a public API")
    return warned(text, "llama.cpp needs --metrics, SGLang --enable-metrics; --metrics URL names another place")


def clock(visit: Visit) -> Outcome:
    if visit.server_date_s is None or visit.local_date_s is None:
        return skipped("the server sends no Date")
    skew = visit.server_date_s - visit.local_date_s
    evidence = {"skew_s": round(skew, 2), "error_s": round(visit.date_error_s, 2)}
    if abs(skew) - visit.date_error_s > SKEW_S:
        ahead = "ahead of" if skew > 0 else "behind"
        return warned(f"the server's clock is {abs(skew):.0f} s {ahead} this host's", "timedatectl; chronyc tracking: "
                      "logs and traces of the two will not line up", **evidence)  # fmt: skip
    return passed(f"clocks agree within {abs(skew) + visit.date_error_s:.1f} s", **evidence)


def round_trip(visit: Visit) -> Outcome:
    times = [time for times in visit.dials.values() for time in times]
    least = min(times) * 1000
    evidence = {"rtt_ms": round(least, 3)}
    if least > FAR_MS:
        return warned(f"round trip {latency(least)}: it is part of every TTFT", "measure from a host near the server",
                      **evidence)  # fmt: skip
    return passed(f"round trip {latency(least)}", **evidence)


CHECKS: tuple[Check[Visit], ...] = (
    Check("endpoint.dns", "Name resolves", "getaddrinfo", "fail if not", dns, "direct"),
    Check("endpoint.tcp", "Port connects", "connect", "fail if none, warn if some do not", tcp, "direct"),
    Check("endpoint.rtt", "Round trip", "connect", "warn beyond 100 ms", round_trip, "connection"),
    Check("endpoint.tls", "TLS", "handshake", "fail if refused, warn 14 days before the end", tls, "connection"),
    Check("endpoint.models", "Models listed", "GET /models", "fail without, or without the asked one", models, "reach"),
    Check("endpoint.auth", "Key", "GET /models with and without key", "fail if refused, warn if open", auth, "http"),
    Check("endpoint.answer", "A prompt is answered right", "a prompt at temperature 0", "fail if empty or garbage",
          answer, "key"),
    Check("endpoint.ready", "Liveness and readiness", "health paths and the prompt", "fail if alive, not ready",
          readiness, "key"),
    Check("endpoint.stream", "Streaming streams", "a streamed prompt", "fail if it comes at the end", streaming,
          "stream"),
    Check("endpoint.usage", "Tokens counted", "usage of the answers", "warn if absent", usage, "stream"),
    Check("endpoint.limit", "Limit held", "usage and max_tokens", "fail if exceeded", limit, "answer"),
    Check("endpoint.context", "Sizes fit the context", "GET /models", "fail if prompt + max tokens is more", context,
          "http"),
    Check("endpoint.metrics", "Server metrics", "GET /metrics", "warn if none", metrics, "http"),
    Check("endpoint.clock", "Clocks agree", "Date header", "warn beyond 2 s", clock, "http"),
)  # fmt: skip
