"""Builds a live session from a plan and runs it, with the screen or without: the composition behind the commands.

Must not parse flags (cli does) or decide what numbers mean.
"""

import asyncio
import hashlib
import os
import platform
import ssl
import sys
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec

from lpxtop import __version__, format, headless
from lpxtop.clock import Clock, SystemClock
from lpxtop.config import Environment
from lpxtop.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TARGET, LpxtopError, TargetError, UsageError
from lpxtop.events.records import SCHEMA, Header
from lpxtop.events.stream import EventSink, EventSource
from lpxtop.load.negotiate import PreFlight, preflight
from lpxtop.metrics import slo
from lpxtop.metrics.state import RunState
from lpxtop.metrics.view import RecordingView
from lpxtop.plan import Negotiated, Network, Plan, Secrets
from lpxtop.recording.writer import LineSink, RecordingWriter, default_path
from lpxtop.session import Session
from lpxtop.workers import Fleet

SAME_SECOND = 50
"""How many runs may begin in one second and still find a name."""
SPARE_DESCRIPTORS = 48
"""Open files of a process beyond its streams."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where results go. `json` and `out` may be "-" for stdout, never both. `record` None: a fresh default path."""

    json: str | None = None
    out: str | None = None
    record: Path | None = None
    no_record: bool = False

    def check(self) -> None:
        if self.json == "-" and self.out == "-":
            raise UsageError("--json - and --out - both want stdout", "send one of them to a file")

    @property
    def stdout_taken(self) -> bool:
        return "-" in (self.json, self.out)


@dataclass(frozen=True, kw_only=True)
class Screen:
    """How the live screen looks; ignored when headless."""

    theme: str | None = None
    color: str = "auto"
    glyphs: str = "auto"
    fps: int = 4
    mouse: bool = False


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Everything a live command decided."""

    plan: Plan
    secrets: Secrets
    environment: Environment
    outputs: Outputs
    screen: Screen = Screen()
    headless: bool = False
    start: bool = False
    yes: bool = False
    kind: str = "run"
    simulated: bool = False
    gpu: str = "nvml"
    metrics_url: str | None = None
    command: Sequence[str] = ()
    clock: Clock = field(default_factory=SystemClock)


# --- pre-flight and header -----------------------------------------------------------------------------------------


def check_target(launch: Launch) -> tuple[Plan, PreFlight]:
    """The plan with the model filled in, and what the endpoint accepts. Raises TargetError.

    Waits for a server that is still loading, with a countdown on stderr.
    """

    def on_wait(text: str) -> None:
        click.echo(f"\r{format.clean(text)}", err=True, nl=False)

    found = asyncio.run(preflight(launch.plan, launch.secrets, on_wait=on_wait))
    target = msgspec.structs.replace(launch.plan.target, model=found.model)
    return msgspec.structs.replace(launch.plan, target=target), found


def confirm_busy(launch: Launch, busy: int | None) -> None:
    """Ask before loading a server that already works for somebody. Raises TargetError when the answer is no."""
    if not busy or launch.yes or launch.kind == "demo":
        return
    text = f"the server already has {busy} request{'s' if busy > 1 else ''} running or waiting"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise TargetError(text, "add --yes to send load all the same")
    click.echo(f"lpxtop: {text}. Send load all the same? [y/N] ", err=True, nl=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise TargetError("no load was sent", "lpxtop watch looks at a busy server without adding to it")


def make_header(launch: Launch, plan: Plan, found: PreFlight | None, origin_ns: int) -> Header:
    """The first event: the reproducible descriptor, without anything secret."""
    negotiated = found.negotiated if found else Negotiated()
    target = msgspec.to_builtins(plan.target) | {
        "server": " ".join(part for part in (negotiated.server_kind, negotiated.server_version) if part) or None
    }
    return Header(
        t=0,
        schema=SCHEMA,
        session=uuid.uuid4().hex,
        wall_ns=launch.clock.wall_ns() - (launch.clock.monotonic_ns() - origin_ns),
        mono_ns=origin_ns,
        lpxtop=__version__,
        kind=launch.kind,
        host=_host(),
        target=target,
        plan=_recordable(plan),
        negotiated=msgspec.to_builtins(negotiated),
        prompts=found.prompts if found else {},
        slo=list(plan.slo),
        tags=plan.tags,
        simulated=launch.simulated,
        command=list(launch.command),
    )


def _recordable(plan: Plan) -> dict[str, Any]:
    """The plan without text: a system prompt as its length and hash, of an extra body the names."""
    found: dict[str, Any] = msgspec.to_builtins(plan)
    if plan.prompts.system is not None and not plan.record_text:
        digest = hashlib.sha256(plan.prompts.system.encode()).hexdigest()[:16]
        found["prompts"]["system"] = f"{len(plan.prompts.system)} characters, sha256 {digest}"
    if plan.sampling.extra_body and not plan.record_text:
        found["sampling"]["extra_body"] = dict.fromkeys(plan.sampling.extra_body, "…")
    return found


def _host() -> dict[str, Any]:
    return {
        "name": platform.node(),
        "os": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }


# --- sources and sinks ---------------------------------------------------------------------------------------------


def make_probes(launch: Launch, plan: Plan, origin_ns: int) -> list[EventSource]:
    """The GPU and the server's metrics. A GPU on this host may not be the endpoint's; the panel says whose it is."""
    probes: list[EventSource] = []
    base = plan.target.url.removesuffix("/v1")
    if launch.simulated:
        from lpxtop.sim.gpu import SimGpuSource

        probes.append(SimGpuSource(base, origin_ns))
    elif launch.gpu.startswith(("http://", "https://")):
        from lpxtop.probes.dcgm import DcgmSource

        probes.append(DcgmSource(launch.gpu, origin_ns, clock=launch.clock))
    elif launch.gpu != "off":
        from lpxtop.probes.gpu import GpuSource

        visible = launch.environment.get("CUDA_VISIBLE_DEVICES")
        probes.append(GpuSource(origin_ns, select=launch.gpu, visible=visible, clock=launch.clock))
    if launch.metrics_url != "off":
        from lpxtop.probes.server import ServerMetricsSource

        probes.append(
            ServerMetricsSource(
                plan.target.url,
                origin_ns,
                metrics_url=launch.metrics_url,
                api_key=launch.secrets.api_key,
                verify=_verify(plan.network),
            )
        )
    return probes


def _verify(network: Network) -> ssl.SSLContext | bool:
    """How the metrics' certificate is checked: as the load's is."""
    if network.insecure:
        return False
    return ssl.create_default_context(cafile=network.cacert) if network.cacert else True


class Recorder:
    """Opens the sinks a launch asks for, header first, and knows the recording's state for the screen."""

    def __init__(self, launch: Launch, model: str | None) -> None:
        self._launch, self._model = launch, model
        self._writer: RecordingWriter | None = None
        self._lines: LineSink | None = None

    def opens(self) -> list[Callable[[Header], Awaitable[EventSink]]]:
        wanted: list[Callable[[Header], Awaitable[EventSink]]] = []
        if not self._launch.outputs.no_record:
            wanted.append(self._open_recording)
        if self._launch.outputs.out is not None:
            wanted.append(self._open_lines)
        return wanted

    def path(self) -> Path:
        outputs = self._launch.outputs
        if outputs.record is not None:
            return outputs.record
        directory = self._launch.environment.state_directory() / "recordings"
        return default_path(directory, self._launch.clock.wall_ns(), self._model or self._launch.kind)

    async def _open_recording(self, header: Header) -> EventSink:
        path = self.path()
        for _ in range(SAME_SECOND):
            try:
                self._writer = await RecordingWriter.create(path, header)
                return self._writer
            except UsageError:
                if self._launch.outputs.record is not None or not path.exists():
                    raise
                path = self.path()  # another run began in the same second
        raise UsageError(f"no free name for the recording beside {path}", "use --record FILE")

    async def _open_lines(self, header: Header) -> EventSink:
        out = self._launch.outputs.out
        descriptor = (
            sys.stdout.fileno()
            if out == "-"
            else os.open(str(out), os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        )
        self._lines = LineSink(descriptor)
        self._lines.event(header)
        return self._lines

    def problems(self) -> list[str]:
        """What went wrong with the event lines of --out."""
        lines, out = self._lines, self._launch.outputs.out
        if lines is None:
            return []
        found = [f"--out {out} stopped: {lines.error}"] if lines.error else []
        return found + ([f"--out {out}: {lines.dropped} frames of arrivals were left out"] if lines.dropped else [])

    def view(self) -> RecordingView:
        if self._writer is None:
            return RecordingView()
        state, path, size, error = self._writer.status()
        return RecordingView(state=state, path=str(path), bytes=size, error=error)


# --- running -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a live command ends with."""

    summary: dict[str, Any]
    exit_code: int
    recording: RecordingView
    problem: str | None = None  # what ended the run before its time
    sink_problems: list[str] = field(default_factory=list)


def run(launch: Launch) -> Outcome:
    """Check the endpoint, run the session with or without a screen, and return what it measured."""
    return _finish(launch, *prepare(launch))


def prepare(launch: Launch) -> tuple[Session, Recorder]:
    """Everything up to the first request: outputs checked, endpoint checked, the session built but not running."""
    _check_terminal(launch)
    launch.outputs.check()
    _check_output_paths(launch.outputs)
    slo.parse_all(launch.plan.slo)
    _check_descriptors(launch.plan)
    plan, found = check_target(launch)
    confirm_busy(launch, found.busy)
    origin_ns = launch.clock.monotonic_ns()
    header = make_header(launch, plan, found, origin_ns)
    recorder = Recorder(launch, plan.target.model)
    session = Session(
        plan=plan,
        header=header,
        state=RunState(exact=True),
        clock=launch.clock,
        origin_ns=origin_ns,
        fleet=Fleet(
            plan, found.negotiated, launch.secrets,
            origin_ns=origin_ns, clock=launch.clock, environment=launch.environment.without_keys(),
        ),
        probes=make_probes(launch, plan, origin_ns),
        open_sinks=recorder.opens(),
        recording=recorder.view,
        autostart=launch.headless or launch.start,
    )  # fmt: skip
    return session, recorder


def watch(launch: Launch) -> Outcome:
    """Probes alone, no load."""
    _check_terminal(launch)
    launch.outputs.check()
    _check_output_paths(launch.outputs)
    origin_ns = launch.clock.monotonic_ns()
    recorder = Recorder(launch, None)
    session = Session(
        plan=launch.plan,
        header=make_header(launch, launch.plan, None, origin_ns),
        state=RunState(exact=True),
        clock=launch.clock,
        origin_ns=origin_ns,
        probes=make_probes(launch, launch.plan, origin_ns),
        open_sinks=recorder.opens(),
        recording=recorder.view,
    )
    return _finish(launch, session, recorder)


def _check_terminal(launch: Launch) -> None:
    """Refuse before an endpoint is bothered when the screen cannot be shown."""
    if not launch.headless:
        from lpxtop.tui.guard import check_terminal

        check_terminal()


def _check_descriptors(plan: Plan) -> None:
    """Refuse a load that needs more sockets than this shell allows: the failures would look like the server's."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = -(-plan.load.concurrency // plan.workers) + SPARE_DESCRIPTORS
    room = max(1, hard - SPARE_DESCRIPTORS)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{plan.load.concurrency} in flight need {needed} open files, and this shell allows {hard}",
            f"ulimit -Hn {needed} (as root), or spread them: --workers {-(-plan.load.concurrency // room)}",
        )


def _check_output_paths(outputs: Outputs) -> None:
    """Refuse before any load what would only fail after it."""
    for flag, path in (("--json", outputs.json), ("--out", outputs.out), ("--record", outputs.record)):
        if path is None or str(path) == "-":
            continue
        directory = Path(path).parent
        if not directory.is_dir():
            raise UsageError(f"{flag} {path}: the directory {directory} does not exist", f"mkdir -p {directory}")
        if Path(path).is_dir():
            raise UsageError(f"{flag} {path} is a directory", "name a file in it")
        if flag != "--json" and Path(path).exists():
            raise UsageError(f"{flag} {path} exists", "lpxtop never overwrites a recording; choose another name")


def _finish(launch: Launch, session: Session, recorder: Recorder) -> Outcome:
    code = asyncio.run(headless.run(session)) if launch.headless else _on_screen(launch, session)
    if session.summary is None:
        raise LpxtopError("the session ended before it began")
    return Outcome(
        summary=session.summary,
        exit_code=code or _exit_code(session),
        recording=recorder.view(),
        problem=session.problem,
        sink_problems=recorder.problems(),
    )


def _exit_code(session: Session) -> int:
    """3 when nothing asked of the target succeeded; a run in which nothing was asked is no failure."""
    if session.reason == "interrupted":
        return EXIT_INTERRUPTED
    requests = (session.summary or {}).get("requests", {})
    nothing_worked = requests.get("sent") and not requests.get("ok") and requests.get("failed")
    return EXIT_TARGET if nothing_worked or session.reason == "failed" else EXIT_OK


def _on_screen(launch: Launch, session: Session) -> int:
    from lpxtop.tui.app import run_app

    screen = launch.screen
    return run_app(
        session,
        title=f"lpxtop {__version__}",
        theme=screen.theme,
        color=screen.color,
        glyphs=screen.glyphs,
        fps=screen.fps,
        mouse=screen.mouse,
        user_themes=launch.environment.config_directory() / "themes",
        start=False,
        session=session.run,
    )
