"""What servers call the same thing: loads the table concepts.toml, and a user's own in front of it. Data only.

Read off the servers' own sources and documents. Must not read samples (canonical.py does).
"""

import tomllib
from importlib import resources
from typing import Any

import msgspec

from lpxtop.errors import UsageError

START_TIME = "process_start_time_seconds"
_PARTS = {"gauge": ("", "_total"), "counter": ("", "_total"), "histogram": ("_bucket", "_sum", "_count")}


class Concept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A canonical quantity. `kind`: gauge, counter, histogram; `join`: how engines combine (sum, max, mean)."""

    kind: str
    join: str = "sum"
    text: str = ""


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a server has it. Only series whose labels have one of the given values count."""

    name: str
    labels: dict[str, str | list[str]] = {}
    scale: float = 1.0
    over: str | None = None
    over_labels: dict[str, str | list[str]] = {}


class ServerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of server: how it is told, which labels name its engines, and its candidates per concept."""

    name: str
    prefix: str | None = None
    families: list[str] = []
    engine: list[str] = []
    only: dict[str, str] = {}
    info: list[str] = []
    concepts: dict[str, list[str | Candidate]] = {}

    def candidates(self, concept: str) -> list[Candidate]:
        """Best first."""
        return [Candidate(name=c) if isinstance(c, str) else c for c in self.concepts.get(concept, [])]

    def is_told_by(self, names: set[str]) -> bool:
        """Whether sample names are this server's."""
        exposed = {part for family in self.families for part in (family, f"{family}_total") if part in names}
        enough = len(exposed) >= len(self.families)
        return enough and (self.prefix is None or any(name.startswith(self.prefix) for name in names))


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole table. `strip`: what relabelling proxies put before names."""

    version: int
    strip: list[str]
    concepts: dict[str, Concept]
    servers: dict[str, ServerTable]

    def plain(self, name: str) -> str:
        """A sample's name without what a proxy put before it."""
        for prefix in self.strip:
            name = name.removeprefix(prefix)
        return name

    def detect(self, names: set[str]) -> str | None:
        """Which kind of server has these sample names: the first that fits."""
        plain = {self.plain(name) for name in names}
        return next((kind for kind, server in self.servers.items() if server.is_told_by(plain)), None)


def exposed_names(kind: str, family: str) -> tuple[str, ...]:
    """How a family of a kind may be written."""
    return tuple(family + part for part in _PARTS[kind])


class Keep:
    """Which sample names are worth parsing: those of candidates, and what else the servers say, but no buckets."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._prefixes = tuple(server.prefix for server in table.servers.values() if server.prefix)
        self._exact = {START_TIME}
        for server in table.servers.values():
            self._exact |= set(server.info)
            for concept, definition in table.concepts.items():
                for candidate in server.candidates(concept):
                    for family in filter(None, (candidate.name, candidate.over)):
                        self._exact |= set(exposed_names(definition.kind, family))

    def __call__(self, name: str) -> bool:
        plain = self._table.plain(name)
        more = plain.startswith(self._prefixes) and not plain.endswith(("_created", "_bucket"))
        return more or plain in self._exact


def load(extra: str | None = None, origin: str = "the table of metric names") -> Table:
    """The table; `extra` is a user's TOML text of the same form, `origin` its name for messages. Raises UsageError."""
    base = tomllib.loads(resources.files(__package__).joinpath("concepts.toml").read_text(encoding="utf-8"))
    try:
        merged = base if extra is None else _merged(base, tomllib.loads(extra))
        table = msgspec.convert(merged, Table)
        _check(table)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"{origin}: {error}", "it has the form of lpxtop/probes/concepts.toml") from None
    return table


def _merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Their lists in front of ours, their tables into ours; their servers are looked for first."""
    merged = dict(extra)
    for key, value in base.items():
        mine = extra.get(key)
        if isinstance(value, dict) and isinstance(mine, dict):
            merged[key] = _merged(value, mine)
        elif isinstance(value, list) and isinstance(mine, list):
            merged[key] = [*mine, *value]
        elif mine is None:
            merged[key] = value
    return merged


def _check(table: Table) -> None:
    for kind, server in table.servers.items():
        unknown = server.concepts.keys() - table.concepts.keys()
        if unknown:
            raise ValueError(f"servers.{kind}: no concept {', '.join(sorted(unknown))}")
        if server.prefix is None and not server.families:
            raise ValueError(f"servers.{kind}: needs a prefix or families to be told by")
    for name, concept in table.concepts.items():
        if concept.kind not in _PARTS or concept.join not in ("sum", "max", "mean"):
            raise ValueError(f"concepts.{name}: kind {concept.kind}, join {concept.join}")
