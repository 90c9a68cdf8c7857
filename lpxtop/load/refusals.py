"""What went wrong with the endpoint, in words for a person: what, where, what to do. Must not send anything."""

import re
import socket
import ssl

import httpx

from lpxtop.errors import TargetError
from lpxtop.format import clean
from lpxtop.load.deltas import error_text
from lpxtop.load.scrub import scrubbed
from lpxtop.plan import Plan, Secrets

_ADVICE = (
    (r"chat.?template", "--api completions sends plain prompts"),
    (r"context (?:length|window|size)|too many tokens|too long", "--prompt-tokens and --max-tokens set the size"),
    (r"temperature", "--temperature 1 is what some models insist on"),
    (r"top_p", "leave out --top-p"),
    (r"max_completion_tokens|max_tokens", "--max-tokens sets it"),
)  # fmt: skip


def unreachable(url: str, error: Exception) -> TargetError:
    """The endpoint could not be reached at all."""
    where = httpx.URL(url)
    host = f"{where.host}:{where.port}" if where.port else where.host
    chain = list(_chain(error))
    for cause in chain:
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLWantReadError):
            return _no_tls(host, cause)
    for cause in chain:
        if isinstance(cause, socket.gaierror):
            return TargetError(
                f"the name {where.host} is not known", "is it spelled right, and does this host have DNS?"
            )
        if isinstance(cause, ConnectionRefusedError):
            return TargetError(f"nothing listens on {host}: connection refused", "is the server running, on that port?")
    if isinstance(error, httpx.TimeoutException):
        perhaps = "a firewall, a stuck server" + (", or it speaks http rather than https" * (where.scheme == "https"))
        return TargetError(f"{host} does not answer: {_kind(error)}", perhaps)
    hint = "is it https rather than http?" if where.scheme == "http" else "is it really an HTTP server?"
    return TargetError(f"{host} cannot be used: {clean(str(chain[-1]) or type(error).__name__)}", hint)


def _chain(error: BaseException) -> list[BaseException]:
    """The error, what caused it, and so on; groups of connection attempts opened up."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop(0)
        if current is None or current in found:
            continue
        found.append(current)
        waiting += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions
    return found


def _kind(error: httpx.TimeoutException) -> str:
    return "no connection in time" if isinstance(error, httpx.ConnectTimeout) else "no response in time"


def _no_tls(host: str, error: ssl.SSLError) -> TargetError:
    if isinstance(error, ssl.SSLCertVerificationError):
        what = f"the certificate of {host} is not accepted: {clean(error.verify_message)}"
        return TargetError(what, "--cacert FILE trusts its authority; --insecure trusts anything")
    if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
        return TargetError(f"{host} does not speak TLS", "is it http rather than https?")
    return TargetError(f"TLS with {host} failed: {clean(error.reason or str(error))}")


def key_refused(response: httpx.Response, body: bytes, secrets: Secrets) -> TargetError:
    """401 or 403."""
    said = scrubbed(error_text(body)[1], secrets)
    words = f": {said}" if said else ""
    if not secrets.api_key and "authorization" not in {name.lower() for name in secrets.headers}:
        what = f"the server wants a key (HTTP {response.status_code}{words})"
        return TargetError(what, "no key was sent: set LPXTOP_API_KEY, or name a variable with --api-key-env")
    return TargetError(
        f"the key was refused (HTTP {response.status_code}{words})", "is it this server's key, and does it still hold?"
    )


def model_unknown(model: str | None, models: tuple[str, ...], said: str) -> TargetError:
    """The model is not served; names those that are."""
    served = f"it serves {listed(models)}" if models else "ask it for /models, or its operator"
    words = f" ({said})" if said else ""
    return TargetError(f"the server does not know the model {model}{words}", f"{served}; choose with -m")


def no_list(response: httpx.Response) -> TargetError:
    """/models does not list models, and none was named."""
    url, status = str(response.url.copy_with(query=None)), response.status_code
    if status == 200:
        kind = clean(response.headers.get("content-type", "something else"), 60)
        return TargetError(f"{url} answers {kind}: no OpenAI API", "is it the right port, and the right path (…/v1)?")
    return TargetError(f"{url} lists no models (HTTP {status})", "is the base URL right (…/v1)? Then name one with -m")


def listed(models: tuple[str, ...], most: int = 8) -> str:
    """Names of models, not more than fit a line or two."""
    more = f" and {len(models) - most} more" if len(models) > most else ""
    return ", ".join(clean(model, 80) for model in models[:most]) + more


def redirected(response: httpx.Response) -> TargetError:
    """A redirect is never followed: it may lead the key elsewhere, and would be in every latency."""
    to = response.headers.get("location", "")
    try:
        target = response.url.join(to).copy_with(username=None, password=None, query=None, fragment=None)
    except (httpx.InvalidURL, ValueError):
        target = httpx.URL("")
    return TargetError(
        f"the server redirects to {clean(str(target)) or 'nowhere'} (HTTP {response.status_code})",
        "give that URL, if it is the one you trust",
    )


def refused(
    response: httpx.Response, body: bytes, plan: Plan, secrets: Secrets, models: tuple[str, ...]
) -> TargetError:
    """Any other status of the probe request."""
    status, url = response.status_code, str(response.url.copy_with(query=None))
    said = scrubbed(error_text(body)[1], secrets)
    if status in (401, 403):
        return key_refused(response, body, secrets)
    if 300 <= status < 400:
        return redirected(response)
    if status in (400, 404) and _about_model(said):
        return model_unknown(plan.target.model, models, said)
    if status in (404, 405):
        return TargetError(f"{url} is not there (HTTP {status})", "is the base URL right (…/v1)? --api completions?")
    if status == 429:
        return TargetError(f"the server sheds load already (HTTP 429: {said})", "wait, or raise the key's limits")
    if status in (502, 504):
        return TargetError(f"a gateway answers for {url}: HTTP {status}", "the server behind it is down, or not up yet")
    hint = next((advice for pattern, advice in _ADVICE if re.search(pattern, said, re.IGNORECASE)), "")
    return TargetError(f"the server refuses the request (HTTP {status}): {said or 'no reason given'}", hint)


def _about_model(said: str) -> bool:
    return bool(re.search(r"\bmodels?\b", said, re.IGNORECASE)) and bool(
        re.search(
            r"not (?:be )?(?:found|exist|available)|does not exist|unknown|invalid model|missing", said, re.IGNORECASE
        )
    )
