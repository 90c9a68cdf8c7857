"""Where a server's metrics are, what limits their reading, and where a key may go. Knows no HTTP client.

The API key goes to the API's own origin only, never to another port; redirects are followed on the same origin only.
"""

from urllib.parse import SplitResult, urlsplit

TIMEOUT_S = 2.0
BODY_BYTES = 16 << 20
ACCEPT = "text/plain;version=0.0.4, application/openmetrics-text;q=0.5"
PATHS = ("/metrics", "/v1/metrics", "/prometheus/metrics")
OTHER_PORTS = (8002, 8081)
"""Triton's metrics port, and where Dynamo's workers have theirs."""


class NoMetrics(Exception):
    """This URL gives no Prometheus text; the text says why. `there`: something answered."""

    def __init__(self, why: str, there: bool = True) -> None:
        super().__init__(why)
        self.there = there


def origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port, the usual port filled in."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, _port(parts)


def _port(parts: SplitResult) -> int | None:
    return parts.port if parts.port is not None else {"http": 80, "https": 443}.get(parts.scheme)


def shown(url: str) -> str:
    """The URL without user, password and query, as events may have it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{_host(parts)}{parts.path}"


def _host(parts: SplitResult) -> str:
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return host if parts.port is None else f"{host}:{parts.port}"


def candidates(base_url: str) -> tuple[list[str], list[str]]:
    """Where the metrics of an API may be, best first: on its own origin, and on other ports of the host."""
    parts = urlsplit(base_url)
    root = f"{parts.scheme}://{_host(parts)}"
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    own = [f"{root}{prefix}{path}" for path in PATHS] + ([f"{root}/metrics"] if prefix else [])
    host = _host(parts._replace(netloc=(parts.netloc.rpartition("@")[2]))).removesuffix(f":{parts.port}")
    others = [f"http://{host}:{port}/metrics" for port in OTHER_PORTS if port != _port(parts)]
    return own, others


def check_head(status: int, content_type: str) -> None:
    """Raises NoMetrics for an answer that is no Prometheus text."""
    if status in (401, 403):
        raise NoMetrics(f"HTTP {status}: it wants a key")
    if status != 200:
        raise NoMetrics(f"HTTP {status}")
    kind = content_type.partition(";")[0].strip().lower()
    if kind in ("application/json", "text/html"):
        raise NoMetrics(f"{kind} instead of Prometheus text")
