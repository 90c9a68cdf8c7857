"""A scripted HTTP server on a real socket: a function answers each request, and every request is kept."""

import asyncio
import json


class Script:
    """`answer(path, headers, body)` returns (status, headers, bytes). `asked` lists (path, headers, body)."""

    def __init__(self, answer, context=None):
        self._answer, self._context = answer, context
        self.asked = []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        port = self._server.sockets[0].getsockname()[1]
        self.root = f"http{'s' if self._context else ''}://127.0.0.1:{port}"
        self.url = f"{self.root}/v1"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _serve(self, reader, writer):
        try:
            first = await reader.readexactly(1)
            if first == b"\x16":  # a TLS handshake: what servers do with it
                return writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
            head = (first + await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            path = head[0].split(" ")[1]
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            raw = await reader.readexactly(int(headers.get("content-length", 0)))
            body = json.loads(raw) if raw else None
            self.asked.append((path, headers, body))
            status, extra, answer = self._answer(path, headers, body)
            lines = [f"HTTP/1.1 {status} X", f"content-length: {len(answer)}", "connection: close"]
            lines += [f"{name}: {value}" for name, value in extra.items()]
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + answer)
            return await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def probes(self):
        """The bodies of the requests for an answer, in order."""
        return [body for path, _, body in self.asked if path.endswith("/completions")]


def page(data, status=200, **headers):
    """A JSON answer."""
    return status, {"content-type": "application/json"} | headers, json.dumps(data).encode()


def models(*names, owned_by="someone", **more):
    return page({"object": "list", "data": [{"id": name, "owned_by": owned_by, **more} for name in names]})


def stream(tokens=8, prompt_tokens=None, continuous=False, usage=True):
    """A good stream of `tokens` chunks."""
    chunks = []
    for index in range(tokens):
        chunk = {"choices": [{"index": 0, "delta": {"content": " w"}, "finish_reason": None}]}
        if continuous:
            chunk["usage"] = {"prompt_tokens": prompt_tokens, "completion_tokens": index + 1}
        chunks.append(chunk)
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    if usage:
        chunks.append({"choices": [], "usage": {"prompt_tokens": prompt_tokens or 20, "completion_tokens": tokens}})
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return 200, {"content-type": "text/event-stream"}, text.encode()


def refuse(message, status=400, **more):
    return page({"error": {"message": message, "type": "invalid_request_error", **more}}, status)
