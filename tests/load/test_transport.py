"""The transport against a byte-exact server: stamps, framing, kept connections, limits, errors, TLS. Real sockets."""

import asyncio
import contextlib
import socket
import ssl
import time

import httpx
import pytest
import trustme
from wire_server import HEAD, LAST, RESET, WireServer, answer, chunk, sse

from lpxtop.errors import UsageError
from lpxtop.load import stamps, transport
from lpxtop.load.connection import READ_BYTES
from lpxtop.load.exchange import StaleConnection, TlsError
from lpxtop.load.stamps import ClockOffset
from lpxtop.load.transport import KernelTransport

EVENTS = [HEAD, chunk(b"data: 1\n\n"), LAST]


class Notes:
    """A sink that writes everything down."""

    def __init__(self):
        self.calls, self.sent_ns, self.reads, self.data = [], [], [], b""
        self.timing = self.status = self.headers = self.error = None

    def sent(self, sent_ns, timing):
        self.calls.append("sent")
        self.sent_ns.append(sent_ns)
        self.timing = timing

    def head(self, status, headers, kernel_ns, user_ns):
        self.calls.append("head")
        self.status, self.headers = status, dict(headers)

    def body(self, data, kernel_ns, user_ns):
        self.calls.append("body")
        self.data += data
        self.reads.append((kernel_ns, user_ns))

    def end(self, error, user_ns):
        self.calls.append("end")
        self.error = error


async def post(through, url, body=b"{}", sink=None, method="POST", **timeouts):
    """One request; without a sink of one's own, a new one. Returns (sink, response)."""
    sink = sink or Notes()
    request = httpx.Request(method, f"{url}/x", content=body, extensions={"sink": sink, "timeout": timeouts})
    return sink, await through.handle_async_request(request)


@contextlib.asynccontextmanager
async def serving(*scripts, offset=None, **more):
    """A server with these scripts and a transport for it."""
    async with WireServer(*scripts, **more) as server:
        through = KernelTransport(offset=offset)
        try:
            yield server, through
        finally:
            await through.aclose()


async def turns(condition):
    """Let the loop turn until this holds."""
    async with asyncio.timeout(2):
        while not condition():
            await asyncio.sleep(0.001)


# --- what the sink hears ---------------------------------------------------------------------------------------------


async def test_the_sink_hears_each_part_in_order():
    """sent, head, body per piece, end; the request's bytes are what httpx built."""
    async with serving([HEAD, chunk(b"a"), 0.01, chunk(b"b"), LAST]) as (server, through):
        sink, response = await post(through, server.url, b'{"q":1}')

    assert sink.calls == ["sent", "head", "body", "body", "end"]
    assert (sink.status, sink.data, sink.error) == (200, b"ab", None)
    assert sink.headers[b"content-type"] == b"text/event-stream"
    assert server.requests[0].startswith(b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % server.port)
    assert server.requests[0].endswith(b'\r\n\r\n{"q":1}')
    assert (sink.timing.connection, sink.timing.dns_us, sink.timing.tls_us) == ("new", sink.timing.dns_us, None)
    assert 0 <= sink.timing.connect_us < 100_000
    smoothed, least = response.extensions["rtt_us"]
    assert 0 < least <= smoothed < 100_000


async def test_stamps_are_between_the_write_and_the_read():
    """Each kernel stamp lies between the server's write and this reader's clock, within a ms (99 %) of the write."""
    script = [HEAD, *[step for _ in range(100) for step in (chunk(b"x"), 0.002)], LAST]
    async with serving(script) as (server, through):
        sink, _ = await post(through, server.url)
        if through.stats.timestamp_source != "kernel":
            pytest.skip("this kernel does not stamp received packets")

    assert server.writes[0][0] > sink.sent_ns[0]
    late = sorted(kernel - write for (kernel, _), write in zip(sink.reads, server.writes[0][1:101], strict=True))
    assert late[0] > -20_000  # the offset of the two clocks is known to a few µs
    assert late[98] < 1_000_000
    assert all(kernel <= user for kernel, user in sink.reads)
    assert through.stats.user_stamps == 0


async def test_a_reader_that_comes_late_does_not_move_the_stamp():
    """A token comes while the loop is blocked for 60 ms: the kernel stamps its arrival, the user's clock the read."""
    keeper = stamps.keep_on()
    client, server = _tcp_pair()
    offset, stats = ClockOffset(), transport.Stats()
    if keeper is None or not stamps.enable(client):
        pytest.skip("this kernel does not stamp received packets")
    await asyncio.sleep(0.05)  # the kernel begins to stamp
    connection = transport.Connection(asyncio.get_running_loop(), client, offset=offset, stats=stats)
    sink = Notes()
    connection.exchange = transport.Exchange(sink, transport.Timing(), head_only=False)
    try:
        written = time.monotonic_ns()
        server.send(HEAD + chunk(b"x"))
        time.sleep(0.06)
        await turns(lambda: sink.reads)
    finally:
        connection.abandon()
        server.close()
        keeper.close()

    kernel, user = sink.reads[0]
    assert kernel - written < 5_000_000
    assert user - written >= 60_000_000


def _tcp_pair():
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    listener.close()
    client.setblocking(False)
    return client, server


async def test_pieces_of_one_read_share_its_stamps():
    """Three HTTP chunks in one write come as three pieces with the very same two stamps."""
    async with serving([HEAD, 0.02, chunk(b"a") + chunk(b"b") + chunk(b"c"), LAST]) as (server, through):
        sink, _ = await post(through, server.url)

    assert sink.data == b"abc"
    assert len(sink.reads) == 3
    assert len(set(sink.reads)) == 1


# --- the clocks ------------------------------------------------------------------------------------------------------


def test_the_offset_is_trusted_until_it_jumps():
    """An offset that moved by 40 µs is taken over; one that moved by 60 µs is not trusted until the next agrees."""
    values = iter([1_000_000, 1_040_000, 1_100_000, 1_100_500, 9_000_000, 9_000_000])
    offset = ClockOffset(lambda: next(values))
    seen = []
    for tick in range(1, 6):
        offset.refresh(tick * 250_000_000)
        seen.append((offset.offset_ns, offset.trusted))

    assert seen == [(1_040_000, True), (1_100_000, False), (1_100_500, True), (9_000_000, False), (9_000_000, True)]
    assert offset.steps == 2


def test_the_offset_is_sampled_at_four_hertz():
    """However often it is asked, a sample is taken every 250 ms."""
    taken = []
    offset = ClockOffset(lambda: len(taken.append(0) or taken) * 0)
    for ms in range(0, 1000, 10):
        offset.refresh(1_000_000_000 + ms * 1_000_000)

    assert len(taken) == 1 + 4


@pytest.mark.parametrize("wrong_by_ns", [1_000_000_000, -1_000_000_000], ids=["in the past", "in the future"])
async def test_stamps_that_cannot_be_are_replaced_and_counted(wrong_by_ns):
    """A stamp before `sent` or after now means a stepped clock: the reader's own clock is used, and counted."""
    true = stamps.sample_offset()
    async with serving(EVENTS, offset=ClockOffset(lambda: true + wrong_by_ns)) as (server, through):
        sink, _ = await post(through, server.url)
        if through.stats.timestamp_source != "kernel":
            pytest.skip("this kernel does not stamp received packets")

    assert all(kernel == user for kernel, user in sink.reads)
    assert through.stats.user_stamps == through.stats.reads > 0


async def test_stamps_after_a_jump_are_not_trusted():
    """The offset jumped by 60 µs between two samples: what is read until the next one has the reader's stamps."""
    true = stamps.sample_offset()
    values = iter([true - 60_000, true])
    offset = ClockOffset(lambda: next(values, true))
    offset.refresh(time.monotonic_ns())
    assert not offset.trusted
    async with serving(EVENTS, offset=offset) as (server, through):
        doubtful, _ = await post(through, server.url)
        await asyncio.sleep(0.3)  # the next sample
        sure, _ = await post(through, server.url)
        if through.stats.timestamp_source != "kernel":
            pytest.skip("this kernel does not stamp received packets")

    assert all(kernel == user for kernel, user in doubtful.reads)
    assert all(kernel < user for kernel, user in sure.reads)


async def test_where_the_kernel_refuses_the_reader_stamps(monkeypatch):
    """Without the socket option every stamp is the reader's, and the source says so."""
    monkeypatch.setattr(stamps, "enable", lambda sock: False)
    async with serving(EVENTS) as (server, through):
        sink, _ = await post(through, server.url)

    assert through.stats.timestamp_source == "user"
    assert all(kernel == user for kernel, user in sink.reads)
    assert through.stats.user_stamps == through.stats.reads


async def test_a_socket_without_recvmsg_is_read_all_the_same(monkeypatch):
    """Where sockets have no recvmsg (Windows) the answer comes in, with the reader's stamps."""

    class Plain:
        def __init__(self, sock):
            self._sock = sock

        def __getattr__(self, name):
            if name == "recvmsg":
                raise AttributeError(name)
            return getattr(self._sock, name)

    start = transport.aiohappyeyeballs.start_connection

    async def plain(*args, **more):
        return Plain(await start(*args, **more))

    monkeypatch.setattr(transport.aiohappyeyeballs, "start_connection", plain)
    async with serving([HEAD, chunk(b"x" * 3 * READ_BYTES), LAST]) as (server, through):
        sink, _ = await post(through, server.url)

    assert len(sink.data) == 3 * READ_BYTES
    assert all(kernel == user for kernel, user in sink.reads)


async def test_a_loop_that_cannot_watch_sockets_is_refused_in_words(monkeypatch):
    """Windows' default loop: one clear line instead of NotImplementedError from inside asyncio."""
    monkeypatch.setattr(asyncio, "ProactorEventLoop", type(asyncio.get_running_loop()), raising=False)
    async with serving(EVENTS) as (server, through):
        with pytest.raises(UsageError, match="event loop"):
            await post(through, server.url)


async def test_the_kernel_stamps_from_the_first_byte_on():
    """A socket of its own keeps the kernel stamping from before the first connection until the transport closes."""
    async with serving(answer(200, b"x", "connection: close")) as (server, through):
        await through.resolve("127.0.0.1", server.port)
        keeper = through._stamping
        if keeper is None:
            pytest.skip("this kernel does not stamp received packets")
        await asyncio.sleep(0.05)
        for _ in range(20):
            await post(through, server.url)
        assert through.stats.user_stamps == 0
        assert keeper.fileno() >= 0

    assert keeper.fileno() == -1


# --- framing ---------------------------------------------------------------------------------------------------------

FRAMED = [
    ("chunks", [HEAD, chunk(b"ab"), chunk(b"c"), LAST], b"abc"),
    ("chunk extensions and trailers", [HEAD, b"3;x=1\r\nabc\r\n0\r\nx-t: 1\r\n\r\n"], b"abc"),
    ("a length", answer(200, b"abc"), b"abc"),
    ("to the end", [b"HTTP/1.1 200 OK\r\n\r\nab", b"c", None], b"abc"),
    ("HTTP/1.0", [b"HTTP/1.0 200 OK\r\n\r\nabc", None], b"abc"),
    ("204", [b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
    ("100, 103, then the answer", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n",
     *answer(200, b"abc")], b"abc"),
    ("bare LF", [b"HTTP/1.1 200 OK\ncontent-length: 3\n\nabc"], b"abc"),
    ("spaces after the chunk size", [HEAD, b"3  \r\nabc\r\n", LAST], b"abc"),
]  # fmt: skip


@pytest.mark.parametrize("one_byte", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize(("name", "script", "body"), FRAMED, ids=[case[0] for case in FRAMED])
async def test_every_framing_ends_where_it_should(name, script, body, one_byte):
    """The body is exactly what was framed, in one piece or byte by byte, and the end is told once."""
    async with serving(script, one_byte=one_byte) as (server, through):
        sink, _ = await post(through, server.url)

    assert (sink.data, sink.error) == (body, None)
    assert sink.calls.count("end") == sink.calls.count("head") == 1
    assert sink.timing.lenient == (name == "bare LF")


async def test_head_has_no_body_whatever_its_length_says():
    """The answer to HEAD ends with its head."""
    async with serving([b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"]) as (server, through):
        sink, _ = await post(through, server.url, method="HEAD")

    assert (sink.status, sink.calls) == (200, ["sent", "head", "end"])


BROKEN = [
    ("closed in the middle of a chunk", [HEAD, chunk(b"ab"), b"9\r\nxx", None], "in the middle", b"abxx"),
    ("closed between chunks", [HEAD, chunk(b"ab"), None], "in the middle", b"ab"),
    ("shorter than its length", [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", None], "in the middle", b"abc"),
    ("closed in the head", [b"HTTP/1.1 200 OK\r\ncontent-", None], "in the middle", b""),
    ("closed without a word", [None], "without an answer", b""),
    ("not HTTP", [b"SSH-2.0-OpenSSH_9.6\r\n", None], "not HTTP/1.1", b""),
    ("HTTP/2", [b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", None], "not HTTP/1.1", b""),
    ("a bad chunk size", [HEAD, b"zz\r\n", None], "not HTTP/1.1", b""),
    ("101", [b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n\x81\x00", 0.2],
     "switched protocols", b""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "script", "words", "body"), BROKEN, ids=[case[0] for case in BROKEN])
async def test_what_breaks_is_one_protocol_error(name, script, words, body):
    """A broken answer raises RemoteProtocolError with words, keeps what came before, and is told to the sink once."""
    async with serving(script) as (server, through):
        sink = Notes()
        with pytest.raises(httpx.RemoteProtocolError, match=words):
            await post(through, server.url, sink=sink)

    assert sink.data == body
    assert sink.calls[-1] == "end"
    assert words in str(sink.error)
    assert len(server.requests) == 1


async def test_a_reset_in_the_middle_is_a_read_error():
    """A connection torn down mid-answer is httpx.ReadError, and not tried again."""
    async with serving([HEAD, chunk(b"ab"), 0.02, RESET]) as (server, through):
        with pytest.raises(httpx.ReadError):
            await post(through, server.url)

    assert len(server.requests) == 1


async def test_a_fault_in_the_sink_is_raised_and_does_not_hang():
    """A sink that raises fails its own request at once, whichever call it was."""
    for name in ("head", "body", "end"):
        sink = Notes()

        def fail(*_):
            raise RuntimeError("mine")

        setattr(sink, name, fail)
        async with serving(EVENTS) as (server, through):
            with pytest.raises(RuntimeError, match="mine"):
                async with asyncio.timeout(1):
                    await post(through, server.url, sink=sink)


# --- kept connections ------------------------------------------------------------------------------------------------


async def test_a_connection_is_kept_for_the_next_request():
    """Two requests in a row share a connection; two at once do not."""
    async with serving(EVENTS) as (server, through):
        first, _ = await post(through, server.url)
        second, _ = await post(through, server.url)
        await asyncio.gather(post(through, server.url), post(through, server.url))

    assert [first.timing.connection, second.timing.connection] == ["new", "reused"]
    assert (second.timing.connect_us, second.timing.dns_us) == (None, None)
    assert server.from_connection == [1, 1, 1, 2] or sorted(server.from_connection) == [1, 1, 1, 2]
    assert (through.stats.new, through.stats.reused, through.stats.stale) == (2, 2, 0)


async def test_an_idle_connection_is_closed_in_time(monkeypatch):
    """Nothing is reused after the idle time, and the socket is given back."""
    monkeypatch.setattr(transport, "IDLE_S", 0.05)
    async with serving(EVENTS) as (server, through):
        await post(through, server.url)
        await turns(lambda: server.closed == 1)
        sink, _ = await post(through, server.url)

    assert sink.timing.connection == "new"


async def test_a_dead_kept_connection_is_tried_again_once():
    """A reused connection that dies before any byte of the answer: one more try on a fresh one, the sink told so."""
    for death in (None, RESET):
        async with serving(EVENTS, [death], EVENTS) as (server, through):
            await post(through, server.url)
            sink, _ = await post(through, server.url)

        assert sink.calls == ["sent", "sent", "head", "body", "end"]
        assert sink.sent_ns[0] < sink.sent_ns[1]
        assert (sink.timing.attempts, sink.timing.connection, sink.error) == (2, "new", None)
        assert server.from_connection == [1, 1, 2]
        assert through.stats.stale == 1


async def test_it_is_tried_again_only_once_and_only_when_stale():
    """A fresh connection that dies, or a reused one that dies after a byte, is an error at once."""
    async with serving(EVENTS, [None], [None]) as (server, through):
        await post(through, server.url)
        with pytest.raises(httpx.RemoteProtocolError, match="without an answer"):
            await post(through, server.url)
        assert len(server.requests) == 3

    async with serving(EVENTS, [b"H", None]) as (server, through):
        await post(through, server.url)
        with pytest.raises(httpx.RemoteProtocolError) as caught:
            await post(through, server.url)
        assert not isinstance(caught.value, StaleConnection)
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    "script",
    [[*EVENTS, b"HTTP/1.1 200 OK\r\n\r\n"], [*EVENTS, 0.02, b"noise"], [b"".join(EVENTS) + b"HTTP/1.1 200 OK\r\n"]],
    ids=["a second answer", "noise", "in the same read"],
)
async def test_bytes_nobody_asked_for_end_the_connection(script):
    """The answer before them stands; the connection is not used again."""
    async with serving(script, EVENTS) as (server, through):
        first, _ = await post(through, server.url)
        await asyncio.sleep(0.05)
        second, _ = await post(through, server.url)

    assert (first.error, second.timing.connection) == (None, "new")
    assert server.from_connection == [1, 2]


async def test_connection_close_is_heeded():
    """What the server said it would close is not kept."""
    async with serving(answer(200, b"x", "connection: close")) as (server, through):
        await post(through, server.url)
        sink, _ = await post(through, server.url)

    assert sink.timing.connection == "new"


async def test_cancelling_closes_the_connection_at_once():
    """A request given up on frees its socket at once, so the server may stop generating; nothing is left open."""
    async with serving([HEAD, *[chunk(b"x"), 0.01] * 1000]) as (server, through):
        sink = Notes()
        task = asyncio.create_task(post(through, server.url, sink=sink))
        await turns(lambda: sink.data)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        begin = time.monotonic()
        await turns(lambda: server.closed == 1)

        assert time.monotonic() - begin < 0.2
        assert not through._all


# --- sending ---------------------------------------------------------------------------------------------------------


async def test_sent_is_the_last_send_of_a_long_request():
    """A body larger than the socket takes at once: `sent` is told when the rest has gone, stamped at the last send."""
    async with serving(EVENTS) as (server, through):
        begin = time.monotonic_ns()
        sink, _ = await post(through, server.url, b"x" * 8_000_000)

    assert server.requests[0].endswith(b"x" * 8_000_000)
    assert begin < sink.sent_ns[0] < server.writes[0][0]
    assert sink.calls == ["sent", "head", "body", "end"]


async def test_an_answer_before_the_request_is_sent_is_heard():
    """413 while the body is still going out: the answer counts, and the connection is not kept."""
    async with serving([*answer(413, b"too large"), 0.3], EVENTS, reads_body=False) as (server, through):
        sink, _ = await post(through, server.url, b"x" * 8_000_000)

        assert (sink.status, sink.data) == (413, b"too large")
        assert sink.calls[0] == "sent"
        assert not through._all


async def test_an_answer_after_the_server_stopped_reading_is_heard():
    """The peer takes no more bytes (EPIPE), but its answer is in the socket: it is read, not lost."""
    client, server = _tcp_pair()
    connection = transport.Connection(asyncio.get_running_loop(), client, offset=ClockOffset(), stats=transport.Stats())
    sink = Notes()
    exchange = connection.exchange = transport.Exchange(sink, transport.Timing(), head_only=False)
    server.send(answer(413, b"no")[0])
    client.shutdown(socket.SHUT_WR)  # the next send fails with EPIPE
    connection.write(b"POST / HTTP/1.1\r\n\r\n")
    await asyncio.wait_for(exchange.done, 1)

    assert (sink.status, sink.data, sink.calls[0]) == (413, b"no", "sent")
    assert not connection.reusable
    connection.close()
    server.close()


# --- limits ----------------------------------------------------------------------------------------------------------


async def test_limits_are_of_silence():
    """read: no byte for so long; write: the server takes nothing. Bytes that keep coming are no silence."""
    async with serving([HEAD, *[chunk(b"x"), 0.1] * 4, LAST]) as (server, through):
        sink, _ = await post(through, server.url, read=0.3)
        assert sink.data == b"xxxx"
    async with serving([HEAD, chunk(b"x"), 5.0]) as (server, through):
        with pytest.raises(httpx.ReadTimeout, match=r"0\.2 s"):
            await post(through, server.url, read=0.2)
        assert not through._all
    async with serving([5.0], reads_body=False) as (server, through):
        with pytest.raises(httpx.WriteTimeout, match=r"0\.2 s"):
            await post(through, server.url, b"x" * 20_000_000, write=0.2)


async def test_a_connection_that_does_not_come_about_in_time():
    """A host that answers no SYN ends with ConnectTimeout after the limit, and leaves no socket."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    crowd = [socket.socket() for _ in range(4)]  # fills the queue, so that further ones get no answer
    for one in crowd:
        one.setblocking(False)
        one.connect_ex(listener.getsockname())
    through = KernelTransport()
    begin = time.monotonic()
    with pytest.raises(httpx.ConnectTimeout, match=r"0\.3 s"):
        await post(through, f"http://127.0.0.1:{listener.getsockname()[1]}", connect=0.3)

    assert 0.25 < time.monotonic() - begin < 1.0
    await through.aclose()
    for one in (*crowd, listener):
        one.close()


# --- names and addresses ---------------------------------------------------------------------------------------------


async def test_a_name_is_looked_up_once():
    """Ten requests at once, then one more: one look-up, whose time the first ones carry."""
    async with serving(EVENTS, host="localhost") as (server, through):
        loop, asked = asyncio.get_running_loop(), []
        real = loop.getaddrinfo

        async def counted(*args, **more):
            asked.append(args)
            await asyncio.sleep(0.03)
            return await real(*args, **more)

        loop.getaddrinfo = counted
        try:
            sinks = [sink for sink, _ in await asyncio.gather(*(post(through, server.url) for _ in range(10)))]
            last, _ = await post(through, server.url)
        finally:
            del loop.getaddrinfo

    assert asked == [("localhost", server.port)]
    assert all(sink.timing.dns_us >= 30_000 for sink in sinks)
    assert all(sink.timing.connect_us < 30_000 for sink in sinks)
    assert last.timing.dns_us is None


async def test_what_cannot_be_reached_is_a_connect_error_in_words():
    """An unknown name names it, a closed port says refused; both are httpx.ConnectError."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    through = KernelTransport()
    with pytest.raises(httpx.ConnectError, match=r"no-such-host\.invalid cannot be resolved"):
        await post(through, "http://no-such-host.invalid")
    with pytest.raises(httpx.ConnectError, match="Connection refused"):
        await post(through, f"http://127.0.0.1:{port}")
    with pytest.raises(httpx.ConnectError, match="Connection refused"):
        await post(through, f"http://localhost:{port}")
    await through.aclose()


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority():
    """(a certificate authority, a server's context for localhost)"""
    ca = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2", "http/1.1"])
    ca.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    return ca, context


async def once(url, context):
    """One request through a transport of its own."""
    through = KernelTransport(context)
    try:
        await post(through, url)
    finally:
        await through.aclose()


def trusting(ca):
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return context


async def test_tls_brings_the_same_bytes_with_stamps(authority):
    """Over TLS: the whole body, HTTP/1.1 agreed on, the handshake timed apart, stamps close to the writes."""
    ca, context = authority
    script = [HEAD, chunk(b"z" * 300_000), *[step for _ in range(20) for step in (0.002, chunk(b"x"))], LAST]
    async with WireServer(script, context=context) as server:
        through = KernelTransport(trusting(ca))
        sink, _ = await post(through, server.url, b"y" * 1_000_000)
        again, _ = await post(through, server.url)
        kernel = through.stats.timestamp_source == "kernel"
        await through.aclose()

    assert sink.data == b"z" * 300_000 + b"x" * 20
    assert server.requests[0].endswith(b"y" * 1_000_000)
    assert (sink.timing.alpn, again.timing.connection) == ("http/1.1", "reused")
    assert sink.timing.tls_us > 0
    if kernel:
        late = sorted(stamp - write for (stamp, _), write in zip(sink.reads[-20:], server.writes[0][2:22], strict=True))
        assert late[0] > -20_000
        assert late[18] < 2_000_000


async def test_tls_answers_end_as_plain_ones_do(authority):
    """To the end of the connection, cut short, torn down, kept and then closed while idle: the same over TLS."""
    ca, context = authority
    to_the_end = [b"HTTP/1.1 200 OK\r\n\r\nab", b"c", None]
    cut, torn = [HEAD, chunk(b"ab"), None], [HEAD, chunk(b"ab"), 0.02, RESET]
    through = KernelTransport(trusting(ca))
    async with WireServer(to_the_end, cut, torn, [*EVENTS, 0.02, None], EVENTS, context=context) as server:
        whole, _ = await post(through, server.url)
        with pytest.raises(httpx.RemoteProtocolError, match="in the middle"):
            await post(through, server.url)
        with pytest.raises(httpx.TransportError):
            await post(through, server.url)
        await post(through, server.url)
        await turns(lambda: not through._all)  # the server hung up on the idle connection
        last, _ = await post(through, server.url)
    await through.aclose()

    assert (whole.data, whole.error) == (b"abc", None)
    assert (last.data, last.timing.connection) == (b"data: 1\n\n", "new")


async def test_noise_inside_tls_is_a_read_error(authority):
    """Bytes that are no TLS record after the handshake end the request at once with a reason."""
    ca, context = authority
    through = KernelTransport(trusting(ca))
    async with WireServer([HEAD, chunk(b"ab"), 30.0], context=context) as server:
        sink = Notes()
        sending = asyncio.create_task(post(through, server.url, sink=sink))
        await turns(lambda: sink.data)
        (connection,) = through._all
        connection._take(b"\x00" * 64, 1, 2)
        with pytest.raises(httpx.ReadError):
            await asyncio.wait_for(sending, 1)
    await through.aclose()


async def test_tls_that_fails_is_told_apart(authority):
    """Unknown authority, wrong name, no TLS at all, hung up in the handshake: each a TlsError with its reason."""
    ca, context = authority
    async with WireServer(EVENTS, context=context) as server:
        with pytest.raises(TlsError, match="certificate is not accepted"):
            await once(server.url, ssl.create_default_context())
        with pytest.raises(TlsError, match="certificate is not accepted"):
            await once(server.url, None)  # httpx's own authorities
        assert server.requests == []
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("elsewhere.example").configure_cert(other)
    async with WireServer(EVENTS, context=other) as server:
        with pytest.raises(TlsError, match=r"(?i)certificate is not accepted.*localhost"):
            await once(server.url, trusting(ca))
    for said, words in ((b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak it"), (b"", "closed the connection")):

        async def blurt(reader, writer, said=said):
            await reader.read(10)
            writer.write(said)
            writer.close()

        listener = await asyncio.start_server(blurt, "127.0.0.1", 0)
        with pytest.raises(TlsError, match=words):
            await once(f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}", trusting(ca))
        listener.close()
        await listener.wait_closed()


# --- as an ordinary transport ----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def ordinary(*scripts, **more):
    async with WireServer(*scripts, **more) as server, httpx.AsyncClient(transport=KernelTransport()) as client:
        yield server, client


async def test_it_serves_httpx_without_a_sink():
    """JSON in, JSON out, status and headers, HEAD and a redirect that nobody follows: as any transport."""
    scripts = (answer(200, b'{"a":1}', "x-h: v"), answer(404, b"no"), [b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"],
               answer(307, b"", "location: /elsewhere"))  # fmt: skip
    async with ordinary(*scripts) as (server, client):
        found = await client.post(server.url, json={"q": 1})
        missing = await client.get(server.url)
        head = await client.head(server.url)
        redirect = await client.get(server.url)

    assert (found.json(), found.headers["x-h"], found.http_version) == ({"a": 1}, "v", "HTTP/1.1")
    assert (missing.status_code, missing.text) == (404, "no")
    assert (head.status_code, head.content) == (200, b"")
    assert redirect.status_code == 307
    assert server.requests[0].endswith(b'{"q":1}') or server.requests[0].endswith(b'{"q": 1}')
    assert server.from_connection[:3] == [1, 1, 1]


async def test_a_body_is_there_as_it_comes():
    """The first part can be read while the server has not written the second."""
    async with ordinary([HEAD, chunk(b"a"), 0.1, chunk(b"b"), LAST]) as (server, client):
        parts = []
        async with client.stream("GET", server.url) as response:
            async for part in response.aiter_raw():
                parts.append((part, time.monotonic_ns()))

    assert [part for part, _ in parts] == [b"a", b"b"]
    assert parts[0][1] < server.writes[0][2]


async def test_a_body_given_up_closes_its_connection():
    """Leaving a stream early closes the socket; nothing goes on in the background."""
    async with ordinary([HEAD, *[chunk(b"x"), 0.01] * 1000]) as (server, client):
        async with client.stream("GET", server.url) as response:
            async for _ in response.aiter_raw():
                break
        await turns(lambda: server.closed == 1)


async def test_a_body_that_breaks_or_stalls_raises():
    """Half a body raises RemoteProtocolError while it is read; silence raises ReadTimeout; a stale start is retried."""
    async with ordinary([HEAD, chunk(b"a"), 0.02, None]) as (server, client):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(server.url)
    async with ordinary([HEAD, chunk(b"a"), 5.0]) as (server, client):
        with pytest.raises(httpx.ReadTimeout):
            await client.get(server.url, timeout=httpx.Timeout(5.0, read=0.2))
    async with ordinary(answer(200, b"1"), [None], answer(200, b"3")) as (server, client):
        assert [(await client.get(server.url)).text for _ in range(2)] == ["1", "3"]


async def test_round_trip_times_are_unknown_where_nobody_tells(monkeypatch):
    """Without TCP_INFO the times are None, not 0."""
    monkeypatch.delattr(socket, "TCP_INFO", raising=False)
    async with serving(EVENTS) as (server, through):
        _, response = await post(through, server.url)

    assert response.extensions["rtt_us"] == (None, None)


async def test_an_sse_script_is_what_it_says():
    """The test server's own helper: head, events, end, each in its own write."""
    async with serving(sse("1", "[DONE]")) as (server, through):
        sink, _ = await post(through, server.url)

    assert sink.data == b"data: 1\n\ndata: [DONE]\n\n"
    assert len(server.writes[0]) == 4
