"""A small HTTP server whose pages the tests change as they go; it keeps every request it got."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Page:
    """What a path answers."""

    body: str = ""
    status: int = 200
    content_type: str = "text/plain; version=0.0.4; charset=utf-8"
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


@dataclass
class MetricsServer:
    """`pages` by path (or a function of how often the path was asked); `requests` as (path, headers)."""

    pages: dict[str, Page | Callable[[int], Page]] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    port: int = 0
    _server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked(self, path: str) -> list[dict[str, str]]:
        return [headers for asked, headers in self.requests if asked == path]

    async def __aenter__(self) -> "MetricsServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            path = head[0].split(" ")[1]
            self.requests.append((path, {k.lower(): v for k, _, v in (h.partition(": ") for h in head[1:]) if k}))
            page = self.pages.get(path, Page("not found", 404))
            page = page(len(self.asked(path))) if callable(page) else page
            await asyncio.sleep(page.delay_s)
            body = page.body.encode()
            lines = [f"HTTP/1.1 {page.status} X", f"content-type: {page.content_type}", f"content-length: {len(body)}"]
            lines += [f"{name}: {value}" for name, value in page.headers.items()]
            writer.write("\r\n".join([*lines, "connection: close", "", ""]).encode() + body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
