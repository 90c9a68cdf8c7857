"""The command line: subcommands, flags, exit codes; the only module that prints results. Imports lazily per command.

stdout has one owner: the summary, unless `--json -` or `--out -` took it; then the summary goes to stderr.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from lpxtop import __version__
from lpxtop.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, LpxtopError, UsageError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def main() -> None:
    """The `lpxtop` command. Prints an error as one or two lines and exits with its code."""
    debug = "--debug" in sys.argv
    _make_streams_safe()
    try:
        code = cli.main(standalone_mode=False, prog_name="lpxtop")
    except click.exceptions.Abort:
        code = EXIT_INTERRUPTED
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show(file=sys.stderr)
        code = 2
    except LpxtopError as error:
        if debug:
            raise
        print("\n".join(error.lines()), file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        code = EXIT_OK
    except Exception as error:
        if debug:
            raise
        print(f"lpxtop: internal error: {type(error).__name__}: {error}", file=sys.stderr)
        print("  run again with --debug for the traceback, and please report it", file=sys.stderr)
        code = 70
    sys.exit(code if isinstance(code, int) else EXIT_OK)


def _make_streams_safe() -> None:
    """A narrow encoding or a closed descriptor must not cost the summary of a run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the process's life
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


# --- flags ---------------------------------------------------------------------------------------------------------


class Duration(click.ParamType):  # type: ignore[type-arg]
    """30s, 500ms, 5m, 1h: seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from lpxtop.config import parse_duration

        return value if isinstance(value, float) else parse_duration(str(value))


class RequestsOrDuration(click.ParamType):  # type: ignore[type-arg]
    """A number of requests, or a duration such as 10s."""

    name = "n|duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        from lpxtop.config import parse_duration

        text = str(value)
        return int(text) if text.isdigit() else parse_duration(text)


class JsonObject(click.ParamType):  # type: ignore[type-arg]
    """A JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        import json

        if isinstance(value, dict):
            return value
        try:
            parsed = json.loads(value)
        except ValueError as error:
            self.fail(f"not JSON: {error}", param, ctx)
        return parsed if isinstance(parsed, dict) else self.fail("not a JSON object", param, ctx)


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _all_of(*decorators: Decorator) -> Decorator:
    def apply(command: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


_POSITIVE = click.IntRange(min=1)

load_flags = _all_of(
    click.option("--concurrency", "-c", type=_POSITIVE, help="Requests kept in flight (closed loop). [1]"),
    click.option("--max-concurrency", type=_POSITIVE, help="Upper end of the slider. [1024]"),
    click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Requests/s, open loop, instead."),
    click.option("--arrival", type=click.Choice(["constant", "poisson"]), help="Of --rate. [poisson]"),
    click.option("--profile", metavar="8@30s,16@30s", help="Steps of load, by themselves; also 2rps@1m,4rps@1m."),
    click.option("--ramp", type=Duration(), help="Spread an increase of the concurrency over this time."),
    click.option("--requests", "-n", type=_POSITIVE, help="Stop after so many measured requests."),
    click.option("--duration", "-d", type=Duration(), help="Stop after this time: 30s, 5m."),
    click.option("--warmup", type=RequestsOrDuration(), help="Requests or time kept out of the figures."),
    click.option("--max-tokens", type=_POSITIVE, help="Output tokens per request. [128]"),
    click.option("--prompt-tokens", type=_POSITIVE, help="Length of the synthetic prompts. [128]"),
    click.option("--prompts", type=click.Path(path_type=Path), help="Prompts from a text or JSONL file instead."),
    click.option("--system", help="System message (chat only)."),
    click.option("--temperature", type=float, help="[0]"),
    click.option("--top-p", type=float),
    click.option("--extra-body", type=JsonObject(), help="JSON merged into each request's body."),
    click.option("--no-stream", is_flag=True, default=None, help="Ask for whole answers; no TTFT or ITL then."),
    click.option("--no-ignore-eos", is_flag=True, default=None, help="Let the model stop early."),
    click.option("--seed", type=int, help="Of prompts and arrivals. [0]"),
    click.option("--settle", type=Duration(), help="Left out after each change of load. [2s]"),
    click.option("--slo", multiple=True, help="'ttft<500ms,tpot<50ms'; goodput and attainment."),
    click.option("--workers", type=_POSITIVE, help="Load processes. [1]"),
)
target_flags = _all_of(
    click.option("--model", "-m", help="By default the only one served."),
    click.option("--api", type=click.Choice(["chat", "completions"]), help="[chat]"),
    click.option("--api-key-env", metavar="NAME", help="Variable with the key. [LPXTOP_API_KEY]"),
    click.option("--env-file", type=click.Path(path_type=Path), help="NAME=value lines, under the environment."),
    click.option("--header", multiple=True, metavar="'NAME: VALUE'", help="A value of $VAR is read from there."),
    click.option("--proxy", help="HTTP proxy for the load (stamps are then user-space)."),
    click.option("--cacert", type=click.Path(exists=True, dir_okay=False), help="CA bundle for TLS."),
    click.option("--insecure", is_flag=True, default=None, help="Do not verify TLS certificates."),
    click.option("--connect-timeout", type=Duration(), help="[10s]"),
    click.option("--first-token-timeout", type=Duration(), help="[600s]"),
    click.option("--timeout", type=Duration(), help="Of a whole request. [none]"),
)
probe_flags = _all_of(
    click.option(
        "--gpu",
        default="nvml",
        metavar="nvml|URL|off",
        help="GPUs of this host (nvml:0-3 selects), or a dcgm-exporter's URL. [nvml]",
    ),
    click.option("--metrics", metavar="URL|off", help="The server's metrics, when not beside its API."),
)
output_flags = _all_of(
    click.option("--headless", is_flag=True, help="No screen: progress on stderr, summary on stdout."),
    click.option("--json", "json_path", metavar="FILE|-", help="Summary as JSON."),
    click.option("--out", metavar="FILE|-", help="Event lines, live."),
    click.option("--record", type=click.Path(path_type=Path), help="Recording's file. [a fresh one]"),
    click.option("--no-record", is_flag=True),
    click.option("--tag", multiple=True, metavar="K=V", help="Kept in the recording: precision=fp8, change=…"),
    click.option("--debug", is_flag=True, help="Tracebacks instead of one-line errors."),
)
screen_flags = _all_of(
    click.option("--theme", help="A theme of themes/ or your own."),
    click.option("--color", type=click.Choice(["auto", "truecolor", "256", "16", "mono"]), default="auto"),
    click.option("--glyphs", type=click.Choice(["auto", "braille", "block", "ascii"]), default="auto"),
    click.option("--fps", type=click.IntRange(1, 10), default=4, help="Frames per second. [4]"),
    click.option("--mouse", is_flag=True, help="Let the mouse move the slider."),
)


@click.group(context_settings=CONTEXT, invoke_without_command=True)
@click.version_option(__version__, prog_name="lpxtop")
@click.pass_context
def cli(context: click.Context) -> None:
    """Load an LLM endpoint, see what its users feel and what the node does; record it, replay it.

    \b
    lpxtop demo                                     a simulated server and GPU, no set-up
    lpxtop run http://gpu01:8000                    a live screen; space starts the load, + and - change it
    lpxtop run URL --headless -c 16 -d 60s --json out.json
    lpxtop watch URL                                look, send nothing
    lpxtop replay                                   choose a recording and see it again
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


# --- live commands -------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("url")
@target_flags
@load_flags
@probe_flags
@output_flags
@screen_flags
@click.option("--start", is_flag=True, help="Send load at once instead of waiting for space.")
@click.option("--yes", "-y", is_flag=True, help="Load a server that is already busy without asking.")
def run(url: str, **flags: Any) -> int:
    """Load an endpoint and see it live.

    \b
    lpxtop run http://127.0.0.1:8000 -m llama-8b
    lpxtop run https://api.example.com/v1 --api-key-env MY_KEY --headless -c 8 -n 200
    """
    from lpxtop import launch

    started = _launch_of(url, flags, kind="run")
    return _report(started, launch.run(started))


@cli.command()
@click.argument("url", required=False)
@target_flags
@probe_flags
@output_flags
@screen_flags
@click.option("--duration", "-d", type=Duration(), help="Stop after this time.")
def watch(url: str | None, **flags: Any) -> int:
    """Look at a node's GPUs, and at a server's own metrics when URL is given. Sends no load."""
    from lpxtop import launch

    started = _launch_of(url or "http://127.0.0.1/v1", flags | ({} if url else {"metrics": "off"}), kind="watch")
    return _report(started, launch.watch(started))


@cli.command()
@load_flags
@output_flags
@screen_flags
@click.option("--preset", default="h100-8b", help="Engine of the simulated server. [h100-8b]")
def demo(preset: str, **flags: Any) -> int:
    """A simulated LLM server and GPU with the live screen. Nothing to set up; everything is marked SIM.

    Move the concurrency with + and - (or { and }) from 4 to 64 and watch TTFT and ITL bend.
    """
    from lpxtop import launch
    from lpxtop.demo import simulated_server

    if flags["concurrency"] is None and flags["rate"] is None:
        flags["concurrency"] = 4
    with simulated_server(preset) as url:
        started = _launch_of(url, flags | {"start": True, "yes": True, "gpu": "sim"}, kind="demo")
        return _report(started, launch.run(started))


@cli.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
@click.pass_context
def sim(context: click.Context) -> int:
    """The simulated OpenAI-compatible server alone (lpxtop sim --help)."""
    from lpxtop.sim.server import main as serve

    return serve(context.args) or EXIT_OK


# --- recordings ----------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("file", required=False)
@screen_flags
@click.option("--follow", is_flag=True, help="Stay at the end of a recording that is still being written.")
@click.option("--debug", is_flag=True)
def replay(file: str | None, follow: bool, debug: bool, **screen: Any) -> int:
    """See a recording on the live screen. Without FILE: a list to choose from; - reads stdin."""
    from lpxtop import replaying

    path = file or replaying.choose(_environment())
    return replaying.replay(path, _screen(screen), _environment(), follow=follow)


@cli.command()
@click.argument("file")
@click.option("--format", "-f", "kind", type=click.Choice(["text", "json", "markdown", "csv"]), default="text")
@click.option("--debug", is_flag=True)
def report(file: str, kind: str, debug: bool) -> int:
    """The summary of a recording: the same numbers as the live run printed."""
    from lpxtop import replaying
    from lpxtop import report as reports

    summary = replaying.fold(file)
    if kind == "json":
        sys.stdout.buffer.write(reports.to_json(summary))
    else:
        print({"text": reports.text, "markdown": reports.markdown, "csv": reports.csv}[kind](summary))
    return EXIT_OK


class _TwoSides(click.Command):
    """Keeps the `--` between the two sides, which click would swallow."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [_BETWEEN if word == "--" else word for word in args])


_BETWEEN = "\0--"


@cli.command(cls=_TwoSides)
@click.argument("files", nargs=-1, required=True, metavar="A B | A1 A2 … -- B1 B2 …")
@click.option("--format", "-f", "kind", type=click.Choice(["text", "json", "markdown"]), default="text")
@click.option("--fail-if", multiple=True, metavar="GATE", help="'p95 ttft > +10%': exit 1 when it holds.")
@click.option("--meant", multiple=True, metavar="NAME", help="A difference that is meant: model, max tokens, …")
@click.option("--seed", type=int, default=0, help="Of the resampling. [0]")
@click.option("--debug", is_flag=True)
def compare(files: tuple[str, ...], kind: Any, **flags: Any) -> int:
    """Two recordings, or two sets of them, with intervals and a verdict; what differs comes first.

    \b
    lpxtop compare before.lpx.jsonl after.lpx.jsonl --fail-if 'p95 ttft > +10%'
    lpxtop compare a1 a2 a3 a4 a5 -- b1 b2 b3 b4 b5
    """
    from lpxtop import comparing

    middle = files.index(_BETWEEN) if _BETWEEN in files else len(files) // 2
    if _BETWEEN not in files and len(files) != 2:
        raise UsageError("which recordings are A and which are B?", "put -- between the two sides")
    text, code = comparing.run(
        files[:middle],
        [name for name in files[middle:] if name != _BETWEEN],
        output_format=kind,
        fail_if=flags["fail_if"],
        seed=flags["seed"],
        meant=flags["meant"],
    )
    print(text.rstrip("\n"))
    return code


@cli.command()
@click.argument("key", required=False)
def explain(key: str | None) -> int:
    """What a number means, or what an error text means and what to do. Without KEY: every number.

    \b
    lpxtop explain ttft
    lpxtop explain "CUDA driver version is insufficient for CUDA runtime version"
    """
    from lpxtop.doctor import explain_error
    from lpxtop.metrics import definitions

    known = key is None or key in definitions.BY_KEY
    answer = None if known or key is None else explain_error(key)
    print(answer or definitions.explain(key))
    return EXIT_OK


@cli.command()
@click.argument("url", required=False)
@click.option("--model", "-m")
@click.option("--api-key-env", metavar="NAME")
@click.option("--only", multiple=True, metavar="ID", help="These checks, or those whose ids begin so: gpu, endpoint.")
@click.option("--skip", multiple=True, metavar="ID")
@click.option("--format", "-f", "kind", type=click.Choice(["text", "json", "markdown"]), default="text")
@click.option("--debug", is_flag=True)
def doctor(url: str | None, kind: str, **flags: Any) -> int:
    """Check this host, and an endpoint when URL is given: PASS, WARN, FAIL or SKIP, each with what to do. Read-only."""
    from lpxtop import config
    from lpxtop import doctor as checks
    from lpxtop.plan import Plan, Secrets

    environment = config.Environment()
    plan, secrets = None, Secrets()
    if url is not None:
        target = config.parse_target(url, model=flags["model"])
        secrets = config.secrets_for(target, environment, key_variable=flags["api_key_env"])
        plan = Plan(target=target)
    text, code = checks.run(
        url,
        environment=environment,
        secrets=secrets,
        only=flags["only"],
        skip=flags["skip"],
        output_format=kind,
        plan=plan,
    )
    print(text.rstrip("\n"))
    return code


# --- from flags to a launch ----------------------------------------------------------------------------------------


def _environment() -> Any:
    from lpxtop.config import Environment

    return Environment()


def _screen(flags: dict[str, Any]) -> Any:
    from lpxtop.launch import Screen

    return Screen(**{name: flags[name] for name in ("theme", "color", "glyphs", "fps", "mouse") if name in flags})


def _launch_of(url: str, flags: dict[str, Any], *, kind: str) -> Any:
    """Flags over environment over files, as a Launch. Warnings go to stderr."""
    from lpxtop import config
    from lpxtop.launch import Launch, Outputs
    from lpxtop.planning import DEFAULTABLE, make_plan

    environment = config.Environment()
    if flags.get("env_file"):
        environment = config.load_env_file(flags["env_file"], environment)
    defaults = config.file_defaults(environment, DEFAULTABLE)
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    settings = _converted(defaults, environment.warnings) | given
    target = config.parse_target(url, model=settings.get("model"), api=settings.get("api"))
    config.check_side_url("--metrics", settings.get("metrics"))
    config.check_side_url("--gpu", settings.get("gpu"))
    settings["proxy"], proxy_auth = config.split_proxy(settings.get("proxy"), environment)
    secrets = config.secrets_for(
        target,
        environment,
        key_variable=settings.get("api_key_env"),
        headers=tuple(settings.get("header", ())),
        proxy_auth=proxy_auth,
    )
    plan = make_plan(target, settings)
    for warning in environment.warnings:
        print(f"lpxtop: warning: {warning}", file=sys.stderr)
    headless = bool(settings.get("headless"))
    return Launch(
        plan=plan,
        secrets=secrets,
        environment=environment,
        outputs=Outputs(
            json=settings.get("json_path"),
            out=settings.get("out"),
            record=settings.get("record"),
            no_record=bool(settings.get("no_record")),
        ),
        screen=_screen(settings),
        headless=headless,
        start=bool(settings.get("start")),
        yes=bool(settings.get("yes")),
        kind=kind,
        simulated=kind == "demo",
        gpu=settings.get("gpu", "nvml"),
        metrics_url=settings.get("metrics"),
        command=_redacted_command(),
    )


def _converted(defaults: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Values from files and the environment, through the same types as the flags; a bad one is named and left out."""
    types = {option.name: option for option in run.params}
    converted: dict[str, Any] = {}
    for name, value in defaults.items():
        option = types.get(name)
        if option is None:
            continue
        one_of_many = getattr(option, "multiple", False) and isinstance(value, str)
        try:
            converted[name] = option.type_cast_value(click.Context(run), [value] if one_of_many else value)
        except (click.BadParameter, LpxtopError, TypeError, ValueError) as error:
            reason = getattr(error, "message", None) or str(error)
            warnings.append(f"setting {name.replace('_', '-')} = {str(value)[:60]!r} is left out: {reason}")
    return converted


_PRIVATE_FLAGS = ("--header", "--proxy", "--extra-body", "--system")


def _redacted_command() -> list[str]:
    """The command line as it may be recorded: without header values, prompt text, or what a URL may hide."""
    from lpxtop.config import without_secrets

    kept: list[str] = []
    hide = False
    for word in sys.argv[1:]:
        flag, equals, value = word.partition("=")
        private = flag in _PRIVATE_FLAGS
        if hide:
            kept.append("…")
        elif equals and flag.startswith("--"):
            kept.append(f"{flag}={'…' if private else without_secrets(value)}")
        else:
            kept.append(without_secrets(word))
        hide = private and not equals and not hide
    return ["lpxtop", *kept]


def _report(started: Any, outcome: Any) -> int:
    """Print the summary where it belongs and say where the recording is. One output that fails spoils no other."""
    from lpxtop import report as reports

    code = int(outcome.exit_code)
    where = sys.stderr if started.outputs.stdout_taken else sys.stdout
    problems = [_attempt("the summary", lambda: print(reports.text(outcome.summary), file=where, flush=True))]
    if started.outputs.json is not None:
        problems.append(
            _attempt(f"--json {started.outputs.json}", lambda: _write_json(started, reports.to_json(outcome.summary)))
        )
    if outcome.problem:
        problems.append(f"the run ended before its time: {outcome.problem}")
    problems += outcome.sink_problems
    recording = outcome.recording
    if recording.state == "failed":
        problems.append(f"recording stopped: {recording.error}; {recording.path} is readable up to there")
    found = [problem for problem in problems if problem]
    with contextlib.suppress(OSError):  # the terminal may be gone
        for problem in found:
            print(f"lpxtop: {problem}", file=sys.stderr)
        if recording.path and recording.state != "failed":
            print(f"recording: {recording.path}", file=sys.stderr)
    return code or (EXIT_USAGE if any("could not be written" in problem for problem in found) else EXIT_OK)


def _write_json(started: Any, data: bytes) -> None:
    if started.outputs.json == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        Path(started.outputs.json).write_bytes(data)


def _attempt(what: str, write: Callable[[], None]) -> str | None:
    """None, or why the output could not be written."""
    try:
        write()
    except BrokenPipeError:
        return None
    except OSError as error:
        return f"{what} could not be written: {error.strerror or error}"
    return None
