"""Targets, keys, headers, durations and configuration files."""

import os

import pytest

from lpxtop.config import (
    Environment,
    file_defaults,
    load_env_file,
    parse_duration,
    parse_target,
    secrets_for,
    split_proxy,
)
from lpxtop.errors import UsageError


@pytest.mark.parametrize(
    ("typed", "url", "api"),
    [
        ("http://gpu01:8000", "http://gpu01:8000/v1", "chat"),
        ("http://gpu01:8000/", "http://gpu01:8000/v1", "chat"),
        ("http://gpu01:8000/v1/", "http://gpu01:8000/v1", "chat"),
        ("https://api.groq.com/openai/v1", "https://api.groq.com/openai/v1", "chat"),
        ("http://h/v1/chat/completions", "http://h/v1", "chat"),
        ("http://h/v1/completions/", "http://h/v1", "completions"),
        ("http://[::1]:8080/v1", "http://[::1]:8080/v1", "chat"),
        ("http://h/v1?key=secret#x", "http://h/v1", "chat"),
        ("HTTP://Host:80/v1", "http://host:80/v1", "chat"),
    ],
)
def test_the_base_of_what_a_person_types(typed, url, api):
    """Bare hosts, trailing slashes and whole endpoint paths all lead to the API's base."""
    target = parse_target(typed)

    assert (target.url, target.api) == (url, api)


@pytest.mark.parametrize("typed", ["gpu01:8000", "localhost", "ftp://h/", "http://", "http://h:99999/", "http://[::1/"])
def test_a_url_that_cannot_be_used_is_a_usage_error(typed):
    """A missing scheme or host, another scheme or a bad port is refused with one line."""
    with pytest.raises(UsageError):
        parse_target(typed)


def test_a_password_in_the_url_is_refused_without_repeating_it():
    """User info in a URL is an error whose text does not carry it."""
    with pytest.raises(UsageError) as caught:
        parse_target("https://user:hunter2@host/v1")

    assert "hunter2" not in "".join(caught.value.lines())
    with pytest.raises(UsageError) as caught:
        parse_target("user:hunter2@host/v1")
    assert "hunter2" not in "".join(caught.value.lines())


@pytest.mark.parametrize(
    ("url", "variables", "key"),
    [
        ("https://api.openai.com/v1", {"OPENAI_API_KEY": "k"}, "k"),
        ("https://eu.api.openai.com/v1", {"OPENAI_API_KEY": "k"}, "k"),
        ("https://api.openai.com.evil.example/v1", {"OPENAI_API_KEY": "k"}, None),
        ("https://evilopenai.com/v1", {"OPENAI_API_KEY": "k"}, None),
        ("http://api.openai.com/v1", {"OPENAI_API_KEY": "k"}, None),
        ("http://127.0.0.1:8000/v1", {"OPENAI_API_KEY": "k"}, None),
        ("https://api.groq.com/openai/v1", {"OPENAI_API_KEY": "k", "GROQ_API_KEY": "g"}, "g"),
        ("https://integrate.api.nvidia.com/v1", {"NGC_API_KEY": "n"}, "n"),
        ("http://127.0.0.1:8000/v1", {"LPXTOP_API_KEY": " own\n"}, "own"),
        ("https://api.openai.com/v1", {"LPXTOP_API_KEY": "own", "OPENAI_API_KEY": "k"}, "own"),
        ("http://127.0.0.1:8000/v1", {"LPXTOP_API_KEY": ""}, None),
    ],
)
def test_a_vendor_key_goes_only_to_that_vendor(url, variables, key):
    """A vendor's variable is used for its own domain over TLS and nowhere else; our own variable anywhere."""
    assert secrets_for(parse_target(url), Environment(variables=variables)).api_key == key


def test_a_named_key_variable_must_be_set():
    """--api-key-env with an unset variable is an error that names it."""
    with pytest.raises(UsageError, match="MY_KEY"):
        secrets_for(parse_target("http://h"), Environment(variables={}), key_variable="MY_KEY")


def test_a_key_over_plain_http_beyond_loopback_warns():
    """The warning comes for another host and not for loopback."""
    there, here = (Environment(variables={"LPXTOP_API_KEY": "k"}) for _ in range(2))

    secrets_for(parse_target("http://gpu01:8000"), there)
    secrets_for(parse_target("http://127.0.0.1:8000"), here)

    assert len(there.warnings) == 1
    assert "gpu01" in there.warnings[0]
    assert here.warnings == []


def test_header_values_can_come_from_the_environment():
    """A value of $NAME is replaced, so that the secret is not on the command line."""
    environment = Environment(variables={"TOKEN": "t0p"})

    secrets = secrets_for(parse_target("http://h"), environment, headers=("X-Auth: $TOKEN", "X-Plain: a: b"))

    assert secrets.headers == {"X-Auth": "t0p", "X-Plain": "a: b"}
    assert "t0p" not in repr(secrets)


@pytest.mark.parametrize("line", ["no colon", "Bad Name: x", ": x", "X: a\r\nInjected: b", "X: $UNSET"])
def test_a_malformed_header_is_refused(line):
    """A header without a name, with a bad name, a line break or an unset variable is an error."""
    with pytest.raises(UsageError):
        secrets_for(parse_target("http://h"), Environment(variables={}), headers=(line,))


def test_an_env_file_others_can_read_warns_and_lies_under_the_environment(tmp_path):
    """The file's values count only where the environment has none; its mode is checked."""
    path = tmp_path / "keys.env"
    path.write_text("# keys\nexport A_KEY='from file'\nB=2\n")
    os.chmod(path, 0o644)

    environment = load_env_file(path, Environment(variables={"B": "from environment"}))

    assert environment.get("A_KEY") == "from file"
    assert environment.get("B") == "from environment"
    assert "chmod 600" in environment.warnings[0]


def test_an_env_file_with_a_mistake_names_the_line(tmp_path):
    """A line that is not NAME=value is an error with its number, without its text."""
    path = tmp_path / "keys.env"
    path.write_text("A=1\nsecretvalue\n")

    with pytest.raises(UsageError, match=":2:") as caught:
        load_env_file(path, Environment(variables={}))
    assert "secretvalue" not in str(caught.value)


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("500ms", 0.5), ("5m", 300), ("1h", 3600), ("2.5", 2.5)])
def test_durations(text, seconds):
    """The suffixes and the bare number."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "abc", "-5s", "0", "5 days"])
def test_what_is_no_duration(text):
    """Nonsense, negative and zero durations are usage errors."""
    with pytest.raises(UsageError):
        parse_duration(text)


def test_defaults_come_from_files_under_the_environment(tmp_path):
    """Environment over the directory's file over the user's file; unknown settings are named."""
    (tmp_path / "lpxtop").mkdir()
    (tmp_path / "lpxtop" / "lpxtop.toml").write_text('model = "a"\nconcurrency = 4\nmax-tokens = 9\n')
    here = tmp_path / "here"
    here.mkdir()
    (here / "lpxtop.toml").write_text('model = "b"\ncolour = "red"\n')
    environment = Environment(variables={"XDG_CONFIG_HOME": str(tmp_path), "LPXTOP_CONCURRENCY": "8"})

    defaults = file_defaults(environment, frozenset({"model", "concurrency", "max_tokens"}), cwd=here)

    assert defaults == {"model": "b", "concurrency": "8", "max_tokens": 9}
    assert len(environment.warnings) == 1
    assert "colour" in environment.warnings[0]


def test_a_broken_file_is_reported_with_its_line_and_skipped(tmp_path):
    """A TOML mistake is a warning with line and column, not a failure."""
    (tmp_path / "lpxtop.toml").write_text("model = \n")
    environment = Environment(variables={"XDG_CONFIG_HOME": str(tmp_path / "none")})

    assert file_defaults(environment, frozenset({"model"}), cwd=tmp_path) == {}
    assert "line 1" in environment.warnings[0]


def test_child_processes_get_no_keys():
    """What looks like a key is not passed on to a child's environment."""
    environment = Environment(variables={"OPENAI_API_KEY": "k", "HF_TOKEN": "t", "PATH": "/bin"})

    assert environment.without_keys() == {"PATH": "/bin"}


def test_a_proxys_password_is_parted_from_its_address():
    """The address may be recorded, the password may not; it can come from the environment as a whole."""
    environment = Environment(variables={"PROXY": "http://me:p%40ss@[::1]:3128/"})

    assert split_proxy("$PROXY", environment) == ("http://[::1]:3128", "me:p@ss")
    assert split_proxy("http://proxy", environment) == ("http://proxy", None)
    assert split_proxy(None, environment) == (None, None)
    for bad in ("proxy:3128", "socks5://h:1", "$UNSET", "http://"):
        with pytest.raises(UsageError):
            split_proxy(bad, environment)
