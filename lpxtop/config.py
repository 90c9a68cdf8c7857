"""Flags, environment and TOML files to a plan and its secrets. The only reader of the environment and of config files.

Precedence: flags > environment (`LPXTOP_<FLAG>`) > `./lpxtop.toml` > the user's `lpxtop.toml` > defaults. Must not
talk to a network, and must not put a secret into a plan.
"""

import ipaddress
import os
import re
import stat
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from lpxtop.errors import UsageError
from lpxtop.plan import Secrets, Target

OWN_KEY = "LPXTOP_API_KEY"

VENDOR_HOSTS: dict[str, tuple[str, ...]] = {
    "OPENAI_API_KEY": ("openai.com",),
    "GROQ_API_KEY": ("groq.com",),
    "NGC_API_KEY": ("nvidia.com",),
    "NVIDIA_API_KEY": ("nvidia.com",),
    "OPENROUTER_API_KEY": ("openrouter.ai",),
    "TOGETHER_API_KEY": ("together.xyz", "together.ai"),
    "FIREWORKS_API_KEY": ("fireworks.ai",),
    "MISTRAL_API_KEY": ("mistral.ai",),
    "DEEPSEEK_API_KEY": ("deepseek.com",),
    "HF_TOKEN": ("huggingface.co",),
}
"""A vendor's variable is used only for that vendor's own domain, and only over TLS."""

_ENDPOINTS = {"/chat/completions": "chat", "/completions": "completions"}
_VARIABLE = re.compile(r"^\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?$")


@dataclass
class Environment:
    """The environment as configuration sees it; tests pass their own mapping."""

    variables: Mapping[str, str] = field(default_factory=lambda: os.environ)
    warnings: list[str] = field(default_factory=list)

    def get(self, name: str) -> str | None:
        """The variable's value; None when it is unset or empty."""
        return self.variables.get(name) or None

    def state_directory(self) -> Path:
        """Where recordings and logs go: `$XDG_STATE_HOME/lpxtop`, by default `~/.local/state/lpxtop`."""
        return Path(self.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "lpxtop"

    def config_directory(self) -> Path:
        """Where the user's `lpxtop.toml` and themes are: `$XDG_CONFIG_HOME/lpxtop`, by default `~/.config/lpxtop`."""
        return Path(self.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "lpxtop"

    def without_keys(self) -> dict[str, str]:
        """The environment for child processes: nothing that looks like a key is passed on."""
        secret = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
        return {name: value for name, value in self.variables.items() if not name.upper().endswith(secret)}


# --- the target ----------------------------------------------------------------------------------------------------


def parse_target(url: str, *, model: str | None = None, api: str | None = None) -> Target:
    """The API's base of what a person typed. A bare `http://host:port` means `/v1`; an endpoint's path chooses the API.

    Raises UsageError for a URL without scheme or host, another scheme, or one that carries a password.
    """
    text = url.strip()
    if "://" not in text:
        raise UsageError(
            f"the URL {_shown(text)} has no scheme", f"try http://{_shown(text)} or https://{_shown(text)}"
        )
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"the URL cannot be read: {error}", "an example: http://127.0.0.1:8000/v1") from None
    if parts.scheme not in ("http", "https"):
        raise UsageError(f"the URL's scheme is {parts.scheme}", "lpxtop speaks http and https")
    if not parts.hostname:
        raise UsageError("the URL has no host", "an example: http://127.0.0.1:8000/v1")
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            "the URL carries a user name or password, which any process list would show",
            f"leave it out and put the key into {OWN_KEY}, or use --header 'Authorization: $VARIABLE'",
        )
    path = parts.path.rstrip("/")
    for ending, name in _ENDPOINTS.items():
        if path.endswith(ending):
            path, api = path.removesuffix(ending), api or name
            break
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    base = f"{parts.scheme}://{host}{f':{port}' if port else ''}{path or '/v1'}"
    return Target(url=base, model=model, api="completions" if api == "completions" else "chat")


def without_secrets(word: str) -> str:
    """A word of a command line without a URL's user info, query and fragment."""
    scheme, separator, rest = word.partition("://")
    if not separator:
        return word
    address = re.split(r"[?#]", rest, maxsplit=1)[0]
    host, slash, path = address.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def check_side_url(flag: str, text: str | None) -> None:
    """Raises UsageError for a --metrics or --gpu URL that carries a password: it would be recorded and shown."""
    if text and "://" in text and "@" in text.partition("://")[2].partition("/")[0]:
        raise UsageError(
            f"{flag}: the URL carries a user name or password", "leave it out; --header reaches the API only"
        )


def _shown(text: str) -> str:
    """A URL for a message, without what may be a password."""
    return text.rpartition("@")[2][:200]


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- secrets -------------------------------------------------------------------------------------------------------


def split_proxy(text: str | None, environment: Environment) -> tuple[str | None, str | None]:
    """(the proxy without user info, `user:password` or None). A value of `$VARIABLE` is read from the environment.

    Raises UsageError for what is no http(s) URL, or an unset variable.
    """
    if text is None:
        return None, None
    variable = _VARIABLE.match(text)
    if variable:
        found = environment.get(variable.group(1))
        if found is None:
            raise UsageError(f"--proxy: the variable {variable.group(1)} is not set")
        text = found
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError("--proxy is no http:// or https:// URL", "an example: --proxy http://proxy.local:3128")
    shown = f"[{host}]" if ":" in host else host
    auth = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    return f"{parts.scheme}://{shown}{f':{port}' if port else ''}", auth


def secrets_for(
    target: Target,
    environment: Environment,
    *,
    key_variable: str | None = None,
    headers: tuple[str, ...] = (),
    proxy_auth: str | None = None,
) -> Secrets:
    """The key and headers for this target. Raises UsageError when a named variable is unset or a header is malformed.

    Without `key_variable`, `LPXTOP_API_KEY`; failing that, a vendor's variable when the host is that vendor's own.
    """
    parts = urlsplit(target.url)
    host = parts.hostname or ""
    key = _api_key(host, parts.scheme, environment, key_variable)
    if key and parts.scheme == "http" and not is_loopback(host):
        environment.warnings.append(f"the API key goes to {host} over plain http: anyone on the path can read it")
    named = dict(_header(line, environment) for line in headers)
    return Secrets(api_key=key, headers=named, proxy_auth=proxy_auth)


def _api_key(host: str, scheme: str, environment: Environment, variable: str | None) -> str | None:
    if variable is not None:
        key = environment.get(variable)
        if key is None:
            raise UsageError(f"--api-key-env names {variable}, which is not set", f"export {variable}=…")
        return key.strip()
    own = environment.get(OWN_KEY)
    if own is not None:
        return own.strip()
    if scheme != "https":
        return None
    for name, domains in VENDOR_HOSTS.items():
        if any(host == domain or host.endswith("." + domain) for domain in domains):
            key = environment.get(name)
            if key is not None:
                return key.strip()
    return None


def _header(line: str, environment: Environment) -> tuple[str, str]:
    """`Name: value`; a value of `$VARIABLE` is read from the environment, so that no secret is on the command line."""
    name, colon, value = line.partition(":")
    name, value = name.strip(), value.strip()
    if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
        raise UsageError(f"--header {name[:40]!r} is not of the form 'Name: value'")
    variable = _VARIABLE.match(value)
    if variable:
        found = environment.get(variable.group(1))
        if found is None:
            raise UsageError(f"--header {name}: the variable {variable.group(1)} is not set")
        value = found
    if re.search(r"[\r\n\0]", value):
        raise UsageError(f"--header {name}: the value holds a line break")
    return name, value


def load_env_file(path: Path, environment: Environment) -> Environment:
    """The environment with the `NAME=value` lines of a file under it. Warns when others can read the file."""
    try:
        text = path.read_text(encoding="utf-8")
        mode = path.stat().st_mode
    except OSError as error:
        raise UsageError(f"--env-file {path}: {error.strerror}") from None
    if sys.platform != "win32" and mode & (stat.S_IRGRP | stat.S_IROTH):
        environment.warnings.append(f"{path} can be read by other users: chmod 600 {path}")
    found: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip().removeprefix("export ")
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name.strip()):
            raise UsageError(f"{path}:{number}: not of the form NAME=value")
        found[name.strip()] = value.strip().strip("'\"")
    return Environment(variables={**found, **environment.variables}, warnings=environment.warnings)


# --- durations and files -------------------------------------------------------------------------------------------

_DURATION = re.compile(r"^(\d+(?:\.\d+)?)(ms|s|m|min|h)?$")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, None: 1.0}


def parse_duration(text: str) -> float:
    """Seconds of `30s`, `500ms`, `5m`, `1h` or a bare number of seconds. Raises UsageError."""
    match = _DURATION.match(text.strip())
    if not match or not float(match.group(1)):
        raise UsageError(f"{text!r} is not a duration", "examples: 30s, 500ms, 5m, 1h")
    return float(match.group(1)) * _SECONDS[match.group(2)]


def file_defaults(environment: Environment, known: frozenset[str], cwd: Path | None = None) -> dict[str, Any]:
    """Defaults from the two `lpxtop.toml` and the environment, by flag name with underscores.

    A file with a mistake is reported in `environment.warnings` with its line, and skipped.
    """
    merged: dict[str, Any] = {}
    for path in (environment.config_directory() / "lpxtop.toml", (cwd or Path()) / "lpxtop.toml"):
        merged |= _read_toml(path, known, environment.warnings)
    for name in known:
        value = environment.get(f"LPXTOP_{name.upper()}")
        if value is not None:
            merged[name] = value
    return merged


def _read_toml(path: Path, known: frozenset[str], warnings: list[str]) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        warnings.append(f"{path}: {error}; defaults are used")
        return {}
    values = {name.replace("-", "_"): value for name, value in data.items()}
    for name in sorted(values.keys() - known):
        warnings.append(f"{path}: unknown setting {name!r} is ignored")
    return {name: value for name, value in values.items() if name in known}
