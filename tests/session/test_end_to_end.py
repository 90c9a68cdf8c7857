"""The whole thread with real processes: command line, load process, simulated server, recording, report."""

import json
import os
import signal
import subprocess
import sys

import pytest
from running import ROOT, HeadKeeper, environment, lpxtop, simulated, truth, wait_for


@pytest.fixture(scope="module")
def url():
    """One simulated server for the tests of this module."""
    with simulated("--seed", "7") as address:
        yield address


def run_json(url, tmp_path, *flags, **more):
    """A headless run; (process, summary, path of the recording)."""
    out, record = tmp_path / "out.json", tmp_path / "out.jsonl"
    done = lpxtop(
        "run", url, "--headless", "--gpu", "off", "--json", out, "--record", record, *flags, home=tmp_path, **more
    )
    return done, json.loads(out.read_text()) if out.exists() else None, record


def test_a_run_counts_what_the_server_counted(url, tmp_path):
    """Requests and tokens of the summary are those of the server's own log."""
    before = len(truth(url))

    done, summary, _ = run_json(url, tmp_path, "-c", "4", "-n", "12", "--max-tokens", "24")

    assert done.returncode == 0, done.stderr
    ours = [r for r in truth(url)[before:] if (r["request_id"] or "").startswith("lpx-")]
    served = [r for r in ours if r["tokens"] == 24]
    assert len(served) == 12
    assert summary["requests"]["ok"] == 12
    assert summary["requests"]["failed"] == 0
    assert summary["tokens"]["output"] == sum(r["tokens"] for r in served) == 288
    assert summary["tokens"]["input"] == sum(r["prompt_tokens"] for r in served)
    assert summary["latency_ms"]["itl"]["count"] == 12 * 23


def test_a_report_says_the_same_number_for_number(url, tmp_path):
    """The summary folded from the recording equals the live run's, every number."""
    _, summary, record = run_json(url, tmp_path, "-c", "8", "-d", "2s", "--max-tokens", "40", "--warmup", "3")

    report = lpxtop("report", record, "--format", "json", home=tmp_path)

    assert report.returncode == 0, report.stderr
    assert json.loads(report.stdout) == summary
    assert summary["requests"]["ok"] > 0


def test_the_text_of_a_report_is_the_text_of_the_run(url, tmp_path):
    """report prints exactly the table the run printed."""
    done, _, record = run_json(url, tmp_path, "-c", "2", "-n", "4", "--max-tokens", "8")

    assert lpxtop("report", record, home=tmp_path).stdout == done.stdout


def test_kill_9_leaves_a_readable_recording_and_no_process(url, tmp_path):
    """After SIGKILL of the tool the recording is read, unfinished, with the requests so far; the load process ends."""
    record = tmp_path / "killed.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "lpxtop", "run", url, "--headless", "-c", "4", "-d", "60s", "--max-tokens", "16",
         "--gpu", "off", "--record", str(record)],
        cwd=ROOT, env=environment(tmp_path), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: record.exists() and record.read_bytes().count(b'"k":"finished"') > 8)
    workers = children(process.pid)
    assert workers

    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    report = lpxtop("report", record, "--format", "json", home=tmp_path)
    assert report.returncode == 0, report.stderr
    assert "has no end" in report.stderr
    finished = record.read_bytes().count(b'"k":"finished"')
    assert json.loads(report.stdout)["requests"]["ok"] == finished
    wait_for(lambda: not any(alive(pid) for pid in workers))


def test_ctrl_c_prints_what_was_measured(url, tmp_path):
    """SIGINT ends the run with 130, a summary and a closed recording."""
    record = tmp_path / "interrupted.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "lpxtop", "run", url, "--headless", "-c", "2", "-d", "60s", "--max-tokens", "16",
         "--gpu", "off", "--record", str(record), "--json", "-"],
        cwd=ROOT, env=environment(tmp_path), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: record.exists() and record.read_bytes().count(b'"k":"finished"') > 4)

    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)

    assert process.returncode == 130, err
    assert json.loads(out)["requests"]["ok"] > 4
    last = json.loads(record.read_bytes().splitlines()[-1])
    assert (last["k"], last["reason"]) == ("end", "interrupted")


def test_stdout_has_one_owner(url, tmp_path):
    """With --json - stdout is JSON and nothing else; --out - is event lines; both at once is refused."""
    summary = lpxtop("run", url, "--headless", "-n", "2", "--max-tokens", "4", "--gpu", "off", "--no-record",
                     "--json", "-", home=tmp_path)  # fmt: skip
    lines = lpxtop("run", url, "--headless", "-n", "2", "--max-tokens", "4", "--gpu", "off", "--no-record",
                   "--out", "-", home=tmp_path)  # fmt: skip
    both = lpxtop("run", url, "--headless", "--json", "-", "--out", "-", home=tmp_path)

    assert json.loads(summary.stdout)["requests"]["ok"] == 2
    events = [json.loads(line) for line in lines.stdout.splitlines()]
    assert events[0]["k"] == "header"
    assert events[-1]["k"] == "end"
    assert sum(event["k"] == "finished" for event in events) == 2
    assert both.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "gpu01:8000", "--headless"], 2, "no scheme"),
        (["run", "http://127.0.0.1:1/v1", "--headless"], 3, "127.0.0.1"),
        (["run", "URL", "-m", "nope", "--headless"], 3, "sim-8b"),
        (["report", "/nonexistent.jsonl"], 2, "no file"),
        (["report", __file__], 2, "not a recording"),
        (["run", "URL", "--headless", "--record", "/nonexistent/dir/x.jsonl"], 2, "does not exist"),
        (["run", "URL", "--headless", "--prompts", "/nonexistent.txt"], 2, "no such file"),
        (["run", "URL", "--headless", "--rate", "2", "-c", "2"], 2, "exclude"),
        (["run", "URL", "--headless", "--duration", "soon"], 2, "duration"),
    ],
)
def test_bad_input_is_one_clear_line(url, tmp_path, arguments, code, says):
    """Each mistake ends with its exit code and one or two lines that name it, and no traceback."""
    done = lpxtop(*[url if word == "URL" else word for word in arguments], home=tmp_path)

    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len(lines) <= 4, done.stderr


def test_a_refused_key_is_said_and_not_repeated(tmp_path):
    """A wrong key ends with 3 and a line that does not carry it."""
    with simulated("--api-key", "right") as url:
        wrong = lpxtop("run", url, "--headless", home=tmp_path, env={"LPXTOP_API_KEY": "wr0ng-canary"})
        right = lpxtop("run", url, "--headless", "-n", "2", "--max-tokens", "4", "--gpu", "off", home=tmp_path,
                       env={"LPXTOP_API_KEY": "right"})  # fmt: skip

    assert wrong.returncode == 3
    assert "key" in wrong.stderr
    assert "wr0ng-canary" not in wrong.stderr + wrong.stdout
    assert right.returncode == 0, right.stderr


def test_a_vendor_key_in_the_environment_is_not_sent_elsewhere(tmp_path):
    """OPENAI_API_KEY reaches no other host, by no request of a run, not even the pre-flight."""
    keeper = HeadKeeper({})
    try:
        lpxtop("run", keeper.url, "--headless", "-m", "m", "-n", "1", home=tmp_path, timeout=30,
               env={"OPENAI_API_KEY": "sk-canary-1", "GROQ_API_KEY": "gsk-canary-2"})  # fmt: skip
    finally:
        keeper.close()

    assert keeper.heads
    assert not any("canary" in head or "authorization" in head.lower() for head in keeper.heads)


def test_no_redirect_carries_the_key_away(tmp_path):
    """A server that redirects to another origin gets the key, the other origin does not."""
    elsewhere = HeadKeeper({})
    location = f"location: {elsewhere.url}/v1/chat/completions\r\n".encode()
    redirect = b"HTTP/1.1 307 Temporary Redirect\r\n" + location + b"content-length: 0\r\n\r\n"
    first = HeadKeeper({}, default=redirect)
    try:
        done = lpxtop("run", first.url, "--headless", "-m", "m", "-n", "1", home=tmp_path, timeout=30,
                      env={"LPXTOP_API_KEY": "canary-key"})  # fmt: skip
    finally:
        first.close()
        elsewhere.close()

    assert done.returncode == 3
    assert any("canary-key" in head for head in first.heads)
    assert not any("canary-key" in head or "authorization" in head.lower() for head in elsewhere.heads)


def test_no_secret_or_text_in_a_recording(url, tmp_path):
    """Neither the key, nor a header's value, nor prompt or answer text is in the recording or the output."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("canary-prompt tell me\n")
    done, _, record = run_json(
        url, tmp_path, "-n", "2", "--max-tokens", "8", "--prompts", prompts, "--header", "X-Team: $CANARY_VALUE",
        env={"LPXTOP_API_KEY": "canary-key", "CANARY_VALUE": "canary-header"},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    written = record.read_text() + done.stdout + done.stderr + (tmp_path / "out.json").read_text()
    for canary in ("canary-key", "canary-header", "canary-prompt tell", " river"):
        assert canary not in written
    assert oct(record.stat().st_mode & 0o777) == "0o600"


def test_failures_are_records_and_the_run_goes_on(tmp_path):
    """Cut streams, errors inside streams and 500s are counted by outcome; what worked is still measured."""
    trouble = '{"cut_every": 5, "error_every": 7, "server_error_every": 11}'
    with simulated("--trouble", trouble) as url:
        done, summary, _ = run_json(url, tmp_path, "-c", "4", "-n", "60", "--max-tokens", "12")
        log = [r for r in truth(url) if (r["request_id"] or "").startswith("lpx-")]

    assert done.returncode == 0, done.stderr
    outcomes = summary["requests"]["by_outcome"]
    assert outcomes["truncated"] == sum(r["outcome"] == "cut" for r in log)
    assert outcomes["stream_error"] == sum(r["outcome"] == "error" for r in log)
    assert outcomes["http_5xx"] == sum(r["outcome"] == "http_500" for r in log)
    assert summary["requests"]["ok"] == sum(r["outcome"] == "ok" and r["tokens"] == 12 for r in log)
    assert summary["latency_ms"]["e2e"]["count"] == summary["requests"]["ok"]


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in out.stdout.split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_a_profile_moves_the_load_and_ends_the_run(url, tmp_path):
    """Three steps: three levels with their concurrency, each control marked as the profile's, and a clean end."""
    done, summary, record = run_json(
        url, tmp_path, "--profile", "1@1.2s,4@1.2s,2@1.2s", "--settle", "200ms", "--max-tokens", "8"
    )

    assert done.returncode == 0, done.stderr
    assert [level["concurrency"] for level in summary["levels"]] == [1, 4, 2]
    assert all(level["latency_ms"]["ttft"]["count"] > 3 for level in summary["levels"])
    events = [json.loads(line) for line in record.read_bytes().splitlines()]
    controls = [
        (e["before"], e["after"], e["by"]) for e in events if e["k"] == "control" and e["what"] == "concurrency"
    ]
    assert controls == [(1, 4, "profile"), (4, 2, "profile")]
    in_flight = [(e["t"], e.get("in_flight", 0)) for e in events if e["k"] == "load"]
    assert max(n for _, n in in_flight) == 4


def test_a_load_process_that_dies_is_said_and_what_was_measured_is_kept(url, tmp_path):
    """Killing the load process ends the run with 3, the reason on stderr, the summary of what came, and an end."""
    record = tmp_path / "dead.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "lpxtop", "run", url, "--headless", "-c", "4", "-d", "60s", "--max-tokens", "16",
         "--gpu", "off", "--record", str(record), "--json", "-"],
        cwd=ROOT, env=environment(tmp_path), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: record.exists() and record.read_bytes().count(b'"k":"finished"') > 8)

    for worker in children(process.pid):
        os.kill(worker, signal.SIGKILL)
    out, err = process.communicate(timeout=20)

    assert process.returncode == 3
    assert "before its time: load process ended" in err
    summary = json.loads(out)
    assert summary["requests"]["ok"] == record.read_bytes().count(b'"k":"finished"')
    assert json.loads(record.read_bytes().splitlines()[-1])["reason"] == "failed"


def test_too_few_open_files_is_not_blamed_on_the_server(url, tmp_path):
    """A shell that allows 64 open files cannot carry 200 streams: refused before any load, with the way out."""
    command = f"ulimit -n 64; exec {sys.executable} -m lpxtop run {url} --headless -c 200 --gpu off"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=30,
                          env=environment(tmp_path), check=False)  # fmt: skip

    assert done.returncode == 2
    assert "this shell allows 64" in done.stderr
    assert "ulimit" in done.stderr


def test_more_load_processes_than_requests_in_flight_still_end(url, tmp_path):
    """Processes without a share of the load end with the others when the duration is over."""
    done, summary, _ = run_json(
        url, tmp_path, "-c", "2", "--workers", "4", "-d", "1s", "--warmup", "500ms", "--max-tokens", "8", timeout=20
    )

    assert done.returncode == 0, done.stderr
    assert summary["requests"]["ok"] > 2


def test_nothing_private_of_the_command_line_is_recorded(url, tmp_path):
    """A query's key, a system prompt, an extra body and a header's value are in no line of the recording."""
    done, _, record = run_json(
        f"{url}/v1?api_key=canary-query", tmp_path, "-n", "1", "--max-tokens", "4", "--system", "canary-system",
        "--extra-body", '{"user": "canary-user"}', "--header", "X-A: canary-header",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "canary" not in record.read_text()
    header = json.loads(record.read_bytes().splitlines()[0])
    assert header["plan"]["sampling"]["extra_body"] == {"user": "…"}
    assert header["plan"]["prompts"]["system"].startswith("13 characters, sha256 ")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--slo", "ttft<<5"], "ttft<<5"),
        (["--slo", "foo<5ms"], "foo"),
        (["--metrics", "http://u:canary@h/metrics"], "password"),
        (["--rate", "inf"], "finite"),
        (["--temperature", "nan"], "finite"),
        (["--prompt-tokens", "100000000"], "more than"),
        (["--json", "/tmp"], "directory"),
    ],
)
def test_mistakes_are_found_before_any_load(url, tmp_path, flags, says):
    """Terms, numbers and paths that cannot be meant end with 2 before a request is sent."""
    before = len(truth(url))

    done = lpxtop("run", url, "--headless", "--gpu", "off", "-n", "1", *flags, home=tmp_path)

    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "canary" not in done.stderr
    assert len(truth(url)) == before


def test_outputs_that_fail_do_not_take_the_summary_with_them(url, tmp_path):
    """A --json that cannot be written is said with 2; the summary is printed, also to a narrow encoding."""
    done = lpxtop("run", url, "--headless", "--gpu", "off", "-n", "2", "--max-tokens", "4", "--no-record",
                  "--json", "/dev/full", home=tmp_path, env={"PYTHONIOENCODING": "ascii"})  # fmt: skip

    assert done.returncode == 2
    assert "2 due ? 2 ok" in done.stdout
    assert "--json /dev/full could not be written: No space left on device" in done.stderr


def test_runs_of_the_same_second_find_their_own_names(url, tmp_path):
    """Three runs begun at once leave three recordings."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "lpxtop", "run", url, "--headless", "--gpu", "off", "-n", "2", "--max-tokens", "4",
             "--yes"],
            cwd=ROOT, env=environment(tmp_path), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    errors = [run.communicate(timeout=30)[1] for run in runs]

    assert [run.returncode for run in runs] == [0, 0, 0], errors
    assert len(list((tmp_path / "state" / "lpxtop" / "recordings").glob("*.jsonl"))) == 3


def test_a_settings_file_with_wrong_types_is_said_and_left_out(url, tmp_path):
    """A bad setting is a warning with its name; a single text for a repeatable flag is one entry."""
    (tmp_path / "config" / "lpxtop").mkdir(parents=True)
    (tmp_path / "config" / "lpxtop" / "lpxtop.toml").write_text(
        'extra-body = 3\nworkers = [1]\nconcurrency = 0\nslo = "ttft<5s"\n'
    )

    done, summary, _ = run_json(url, tmp_path, "-n", "2", "--max-tokens", "4")

    assert done.returncode == 0, done.stderr
    for name in ("extra-body", "workers", "concurrency"):
        assert f"setting {name}" in done.stderr
    assert summary["slo"]["attainment"] == 1.0
