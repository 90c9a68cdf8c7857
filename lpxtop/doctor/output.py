"""The report as text, JSON and a markdown checklist. Must not judge or look at anything.

Strings come from files, drivers and servers: they are cleaned before they reach a terminal.
"""

import textwrap
from itertools import groupby

import msgspec

from lpxtop.doctor.results import Report, Result
from lpxtop.format import clean

WIDTH = 80
_MOST_TEXT = 600
_ID = 19
_BOXES = {"pass": "[x]", "warn": "[ ]", "fail": "[ ]", "skip": "[ ]"}


def report_text(report: Report) -> str:
    """Aligned lines of at most 80 columns; advice is indented; neighbouring skips of one cause are one line."""
    head = f"lpxtop doctor: {clean(report.host) or 'this host'}" + (f" and {report.url}" if report.url else "")
    lines = [head, ""]
    for key, group in groupby(report.checks, key=_group):
        members = list(group)
        told = [_one(member) for member in members] if key is None or len(members) == 1 else [_skips(members)]
        lines += [line for part in told for line in part]
    lines += ["", _sum(report)]
    return "\n".join(lines)


def _group(result: Result) -> str | None:
    """Neighbours with the same key are told together: plain skips of one cause."""
    return result.text if result.status == "skip" and not result.advice else None


def _one(result: Result) -> list[str]:
    lines = _wrapped(f"{result.status.upper()}  {result.id:<{_ID}} ", clean(result.text, _MOST_TEXT))
    if result.advice:
        lines += _wrapped(" " * 6 + "> ", clean(result.advice, _MOST_TEXT))
    return lines


def _skips(members: list[Result]) -> list[str]:
    areas = ", ".join(dict.fromkeys(member.id.partition(".")[0] + ".*" for member in members))
    return _wrapped(f"SKIP  {f'{len(members)} checks':<{_ID}} ", f"{clean(members[0].text)} ({areas})")


def _wrapped(first: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False
    ) or [first.rstrip()]


def _sum(report: Report) -> str:
    return ", ".join(f"{number} {status}" for status, number in report.counts.items())


def report_json(report: Report) -> str:
    """Schema `lpxtop.doctor/1`; beside its four fields each check has title, source and evidence."""
    data = {
        "schema": "lpxtop.doctor/1",
        "host": report.host,
        "url": report.url,
        "checks": [msgspec.to_builtins(check) for check in report.checks],
        "summary": report.counts,
    }
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()


def report_markdown(report: Report) -> str:
    """A checklist for a release document: what passed is ticked, what was not checked says so."""
    subject = clean(report.host) + (f" and {report.url}" if report.url else "")
    lines = [f"## Checks before launch: {subject}", "", f"{_sum(report)}", ""]
    for check in report.checks:
        mark = "" if check.status == "pass" else f"**{check.status.upper()}** "
        lines.append(f"- {_BOXES[check.status]} {mark}{_plain(check.title)} (`{check.id}`): {_plain(check.text)}")
        if check.advice and check.status != "skip":
            lines.append(f"  - {_plain(check.advice)}")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Text without what markdown would take as its own."""
    return clean(text, _MOST_TEXT).translate({ord(c): f"\\{c}" for c in "*_`|<>[]"})
