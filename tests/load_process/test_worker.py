"""The load process over real pipes, against a real server that keeps its own log."""

from load_process_server import Server
from load_process_worker import Worker

from lpxtop.events.commands import Resume
from lpxtop.events.records import Arrivals, Finished, LoadSample, Request, Source
from lpxtop.plan import Load, Stop


async def test_exactly_so_many_requests_and_every_token():
    """Stop by requests sends exactly that many, and the sums of the events are those of the server's own log."""
    async with (
        Server(tokens=5) as server,
        Worker(server.url, load=Load(concurrency=3), stop=Stop(requests=10)) as worker,
    ):
        worker.send(Resume())
        code = await worker.end()

    finished = worker.of(Finished)
    assert code == 0
    assert len(server.seen) == 10
    assert [event.outcome for event in finished] == ["ok"] * 10
    assert sorted(event.request_id for event in finished) == sorted(seen.id for seen in server.seen)
    assert sum(event.output_tokens for event in finished) == sum(seen.tokens for seen in server.seen) == 50
    assert sum(len(event.gap) for event in worker.of(Arrivals)) == 50
    assert server.most_in_flight == 3
    assert len({event.id for event in worker.of(Request)}) == 10
    assert worker.of(LoadSample)[-1].done == {"ok": 10}
    assert [source.state for source in worker.of(Source)] == ["joined", "left"]
    assert worker.events[0].state == "joined"
    assert worker.events[-1].state == "left"
