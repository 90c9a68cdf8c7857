"""The screen on a real pseudo-terminal: however it ends, the terminal is given back, and the session was closed."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from terminals import SCRIPT, Terminal

COLOR = re.compile(rb"\x1b\[[0-9;:]*m")


def colors(raw: bytes) -> set[str]:
    """Every colour parameter in the SGR codes of a stream, 39 and 49 (the terminal's own) apart."""
    found = set()
    for code in COLOR.findall(raw):
        numbers = code[2:-1].decode().split(";")
        found |= {n for n in numbers if n.isdigit() and (30 <= int(n) <= 38 or 40 <= int(n) <= 48 or int(n) >= 90)}
    return found


def test_q_on_a_ready_screen_quits_and_gives_the_terminal_back(tmp_path):
    """q without load ends with 0; the session had closed what it opened before."""
    closed = tmp_path / "closed"
    with Terminal("ready", f"closed={closed}") as terminal:
        terminal.until("space starts")
        terminal.keys("q")

        assert terminal.wait() == 0
        assert terminal.restored()
        assert closed.read_text() == "closed"
        assert "('stop', 'done')" in terminal.text()


def test_q_asks_while_load_runs():
    """A first q asks, any other key goes on, q and y quit."""
    with Terminal("live") as terminal:
        terminal.until("LIVE")
        terminal.keys("q")
        terminal.until("stop the load and quit?")
        terminal.keys("n")
        terminal.until("in flight 16")
        assert terminal.process.poll() is None
        terminal.keys("q")
        terminal.until("stop the load and quit?")
        terminal.keys("y")

        assert terminal.wait() == 0
        assert terminal.restored()


def test_ctrl_c_first_stops_the_load_and_then_quits():
    """The first ctrl+c pauses, the second within two seconds ends with 130."""
    with Terminal("live") as terminal:
        terminal.until("LIVE")
        terminal.keys("\x03")
        terminal.until("PAUSED")
        terminal.keys("\x03")

        assert terminal.wait() == 130
        assert terminal.restored()
        assert "[('pause',), ('stop', 'interrupted')]" in terminal.text()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT"])
def test_a_signal_closes_the_session_and_gives_the_terminal_back(name, tmp_path):
    """Exit 128 + n, after the session was closed."""
    number = getattr(signal, name)
    closed = tmp_path / "closed"
    with Terminal("live", f"closed={closed}") as terminal:
        terminal.until("LIVE")
        terminal.read(0.5)  # the first frame can be there a moment before the session has begun
        terminal.signal(number)

        assert terminal.wait() == 128 + number
        assert terminal.restored()
        assert closed.exists()


def test_a_session_that_does_not_end_is_cut_after_a_signal():
    """Requests in flight get two seconds, then are cancelled; a second signal does not wait."""
    with Terminal("live", "drain=60") as terminal:
        terminal.until("LIVE")
        terminal.signal(signal.SIGTERM)
        terminal.until("stopping")
        terminal.signal(signal.SIGTERM)
        started = time.monotonic()

        assert terminal.wait(12) == 143
        assert time.monotonic() - started < 8
        assert "('cancel',)" in terminal.text()
        assert terminal.restored()


def test_a_crash_of_the_screen_shows_no_local_variables():
    """The exception reaches the caller once the terminal is back; a key in a local variable is nowhere."""
    with Terminal("live", "crash=sk-very-secret") as terminal:
        code = terminal.wait()

        assert code == 1
        assert terminal.restored()
        assert b"the view broke" in terminal.raw
        assert b"sk-very-secret" not in terminal.raw


def test_a_session_that_fails_ends_the_screen_with_its_error():
    """The session's exception is raised after the terminal was restored."""
    with Terminal("ready", "fail=1") as terminal:
        assert terminal.wait() == 2
        assert terminal.restored()
        assert "lpxtop: the load process died" in terminal.text()


def test_what_libraries_write_to_descriptor_2_is_not_on_the_screen(tmp_path):
    """It goes to the log while the screen is up."""
    log = tmp_path / "log"
    with Terminal("ready", "noise=1", f"log={log}") as terminal:
        terminal.until("space starts")
        terminal.keys("q")
        terminal.wait()

        assert log.read_text() == "native library says hello\n"
        assert b"hello" not in terminal.raw


def test_without_a_log_file_it_is_printed_afterwards():
    """Nothing that was said is lost: it stands on the normal screen after the end."""
    with Terminal("ready", "noise=1") as terminal:
        terminal.until("space starts")
        terminal.keys("q")
        terminal.wait()

        assert terminal.raw.index(b"native library says hello") > terminal.raw.rindex(b"\x1b[?1049l")


def test_no_color_sends_no_colour_at_all():
    """Not even grey: only bold, dim, underline and reverse; what is on the screen is readable."""
    with Terminal("storm", env={"NO_COLOR": "1"}, size=(120, 40)) as terminal:
        terminal.until("errors dominate")
        terminal.keys("?")
        terminal.until("send requests")
        terminal.keys("q")
        terminal.until("errors dominate")
        terminal.keys("qy")
        terminal.wait()

        assert colors(terminal.raw) == set()


@pytest.mark.parametrize(
    ("arguments", "env", "allowed"),
    [
        (("color=16",), {}, lambda n: n != 38),
        (("color=mono",), {"COLORTERM": "truecolor"}, lambda n: False),
        (("theme=ansi",), {"COLORTERM": "truecolor"}, lambda n: n not in (38, 48)),
    ],
)
def test_fewer_colours_on_request(arguments, env, allowed):
    """16 colours and the ANSI theme never send 256-colour or truecolor codes, mono none."""
    with Terminal("live", *arguments, env=env) as terminal:
        terminal.until("LIVE")
        terminal.keys("qy")
        terminal.wait()

        assert all(allowed(int(n)) for n in colors(terminal.raw))


def test_truecolor_is_used_where_the_terminal_says_so():
    """The default theme's blue reaches a truecolor terminal as it is."""
    with Terminal("live", env={"COLORTERM": "truecolor"}) as terminal:
        terminal.until("LIVE")

        assert b"38;2;86;180;233" in terminal.raw


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"TERM": "dumb"}, "TERM is dumb"),
        ({"TERM": ""}, "TERM is not set"),
        ({"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}, "not UTF-8"),
    ],
)
def test_a_terminal_that_cannot_show_it_is_refused(env, why):
    """Exit 2 with one line that says what to do, and no escape code."""
    with Terminal("ready", env=env) as terminal:
        assert terminal.wait() == 2
        assert b"\x1b" not in terminal.raw
        assert why in terminal.text()
        assert "--headless" in terminal.text().replace("\n", "")


def test_without_a_terminal_it_is_refused():
    """No tty at all: exit 2, one line, no escape codes, at once; Textual is not even loaded."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(SCRIPT), "ready"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        start_new_session=True,
        timeout=20,
    )
    spoken = [line for line in done.stderr.decode().splitlines() if not line.startswith("import time:")]

    assert done.returncode == 2
    assert len(spoken) == 1
    assert "--headless" in spoken[0]
    assert b"textual" not in done.stderr
    assert b"\x1b" not in done.stdout + done.stderr


def test_keys_come_from_the_terminal_when_stdin_is_a_pipe():
    """A replay from a pipe: the pipe stays on stdin, keys are read from /dev/tty."""
    read, write = os.pipe()
    with Terminal("replay", stdin=read) as terminal:
        os.close(read)
        terminal.until("REPLAY")
        terminal.keys(" ")
        terminal.until("REPLAY paused")
        terminal.keys("q")

        assert terminal.wait() == 0
        assert terminal.restored()
    os.close(write)


def test_a_piped_stdout_does_not_make_it_80_by_24():
    """`--json - | jq`: the size is the terminal's."""
    with Terminal("live", size=(120, 40), stdout=subprocess.DEVNULL) as terminal:
        terminal.until("mem clock")


def test_a_terminal_that_hangs_up_ends_it_even_where_sighup_is_ignored():
    """nohup, sudo: no spinning for ever; the session is closed and the code is that of SIGHUP."""
    with Terminal("live", ignore=(signal.SIGHUP,)) as terminal:
        terminal.until("LIVE")
        os.close(terminal._slave)
        os.close(terminal.master)

        assert terminal.process.wait(8) == 129


def test_a_terminal_that_takes_nothing_does_not_stop_the_run(tmp_path):
    """Nobody reads for three seconds at ten frames a second: frames are dropped, the session goes on, and once the
    terminal reads again everything is drawn and the screen says that the link is slow."""
    closed = tmp_path / "closed"
    with Terminal("eight", "lively=1", "start=1", "fps=10", f"closed={closed}", size=(200, 60)) as terminal:
        terminal.until("LIVE")
        time.sleep(3)
        terminal.until("slow link")
        terminal.until("H200")
        terminal.signal(signal.SIGTERM)

        assert terminal.wait() == 143
        assert closed.exists()


def test_a_mouse_is_asked_for_only_when_wanted():
    """No mouse codes by default; with mouse they are switched off again."""
    with Terminal("ready") as quiet, Terminal("ready", "mouse=1") as terminal:
        quiet.until("space starts")
        terminal.until("space starts")
        quiet.keys("q")
        terminal.keys("q")
        quiet.wait()
        terminal.wait()

        assert b"\x1b[?1003h" not in quiet.raw
        assert b"\x1b[?1003h" in terminal.raw
        assert terminal.restored()
