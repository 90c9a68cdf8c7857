"""Runs the table: chooses checks, asks NVML and the endpoint once, gives each check its 3 s. Must not print.

A check that raises or does not end is a SKIP with the reason: the doctor itself must never be the fault.
"""

import asyncio
import contextlib
import platform
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from lpxtop.config import Environment, parse_target
from lpxtop.doctor import containers, driver, endpoint, gpu, health, output, system
from lpxtop.doctor.card import NvmlAnswer, ask_nvml
from lpxtop.doctor.node import Node, loader_complaint
from lpxtop.doctor.results import Check, Outcome, Report, Result, skipped
from lpxtop.doctor.visit import Visit, visit
from lpxtop.errors import UsageError
from lpxtop.plan import Network, Plan, Sampling, Secrets, Target

CHECK_S = 3.0
HOST_CHECKS: tuple[Check[Node], ...] = driver.CHECKS + gpu.CHECKS + health.CHECKS + containers.CHECKS + system.CHECKS
_USE_NVML = ("gpu.present", "sys.shm")
ENDPOINT_CHECKS: tuple[Check[Visit], ...] = endpoint.CHECKS


async def examine(
    url: str | None,
    *,
    environment: Environment,
    secrets: Secrets = Secrets(),  # noqa: B008 - frozen
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    plan: Plan | None = None,
    node: Node | None = None,
) -> Report:
    """Every chosen check's result, in the table's order. `url` as a person types it; None: this host only.

    `plan` is what the endpoint is asked to bear (model, sizes, network); `node` replaces this host. `only` and `skip`
    are ids or their beginnings (`gpu`, `endpoint.tls`). Raises UsageError for a bad URL or an id that nothing has.
    """
    chosen = _chosen(only, skip)
    if url is not None:
        target = parse_target(url, model=plan.target.model if plan else None, api=plan.target.api if plan else None)
        plan = _for(target, plan)
    if node is None:
        node = _this_host(environment, secrets, plan)
        node.url = plan.target.url if plan is not None and url is not None else None
        node.nvml, found = await asyncio.gather(_nvml(chosen), _visit(plan, secrets, url, chosen))
    else:
        found = await _visit(plan, secrets, url, chosen)
    wanted = [check for check in HOST_CHECKS if check.id in chosen]
    results = list(await asyncio.gather(*(_one(check, node) for check in wanted)))
    if found is not None:
        results += [_result(check, _look(check, found)) for check in ENDPOINT_CHECKS if check.id in chosen]
    shown = plan.target.url if plan is not None and url is not None else None
    return Report(checks=tuple(results), url=shown, host=platform.node())


def run(
    url: str | None,
    *,
    environment: Environment,
    secrets: Secrets = Secrets(),  # noqa: B008 - frozen
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    output_format: str = "text",
    plan: Plan | None = None,
) -> tuple[str, int]:
    """(what to print, exit code) of `lpxtop doctor`. `output_format`: text, json, markdown. Raises UsageError."""
    makers = {"text": output.report_text, "json": output.report_json, "markdown": output.report_markdown}
    if output_format not in makers:
        raise UsageError(f"doctor has no format {output_format!r}", f"one of {', '.join(makers)}")
    report = asyncio.run(examine(url, environment=environment, secrets=secrets, only=only, skip=skip, plan=plan))
    return makers[output_format](report), report.exit_code


def _chosen(only: Sequence[str], skip: Sequence[str]) -> set[str]:
    ids = [check.id for check in HOST_CHECKS] + [check.id for check in ENDPOINT_CHECKS]
    only, skip = _split(only), _split(skip)
    for flag, names in (("--only", only), ("--skip", skip)):
        for name in names:
            if not any(_means(name, check) for check in ids):
                areas = ", ".join(dict.fromkeys(check.partition(".")[0] for check in ids))
                raise UsageError(f"{flag} {name}: no check is called so", f"ids begin with {areas}")
    return {
        check
        for check in ids
        if (not only or any(_means(name, check) for name in only)) and not any(_means(name, check) for name in skip)
    }


def _split(names: Sequence[str]) -> list[str]:
    """Ids given one by one or with commas."""
    return [part.strip() for name in names for part in name.split(",") if part.strip()]


def _means(name: str, check: str) -> bool:
    name = name.removesuffix("*").removesuffix(".")
    return check == name or check.startswith(name + ".")


def _for(target: Target, plan: Plan | None) -> Plan:
    if plan is None:
        return Plan(target=target, sampling=Sampling(ignore_eos=False), network=Network())
    return msgspec.structs.replace(plan, target=target)


async def _visit(plan: Plan | None, secrets: Secrets, url: str | None, chosen: set[str]) -> Visit | None:
    if plan is None or url is None or not any(check.id in chosen for check in ENDPOINT_CHECKS):
        return None
    return await visit(plan, secrets)


def _this_host(environment: Environment, secrets: Secrets, plan: Plan | None) -> Node:
    return Node(
        variables=environment.variables,
        key=secrets.api_key,
        recordings=environment.state_directory() / "recordings",
        concurrency=plan.load.concurrency if plan is not None else 1,
        linker_says=loader_complaint,
    )


async def _nvml(chosen: set[str]) -> NvmlAnswer:
    """NVML's answer, where a chosen check uses it."""
    used = any(check.id in chosen and (check.needs or check.id in _USE_NVML) for check in HOST_CHECKS)
    return await ask_nvml() if used else NvmlAnswer()


async def _one(check: Check[Node], node: Node) -> Result:
    """One check in a daemon thread: a file in /proc or /sys may block for as long as a driver hangs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Outcome] = loop.create_future()

    def tell(outcome: Outcome) -> None:
        if not done.done():
            done.set_result(outcome)

    def work() -> None:
        outcome = _look(check, node)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waited
            loop.call_soon_threadsafe(tell, outcome)

    threading.Thread(target=work, name=check.id, daemon=True).start()
    try:
        outcome = await asyncio.wait_for(done, CHECK_S)
    except TimeoutError:
        outcome = skipped(f"did not end within {CHECK_S:g} s: {check.source} does not answer")
    return _result(check, outcome)


def _look(check: Check[Any], subject: Any) -> Outcome:
    missing = subject.lacks(check.needs) if check.needs else None
    if missing is not None:
        return skipped(missing)
    try:
        return check.look(subject)
    except Exception as error:  # one check's trouble with an odd host must not hide the others
        return skipped(f"the check itself failed: {type(error).__name__}: {error}", "please report it")


def _result(check: Check[Any], outcome: Outcome) -> Result:
    return Result(
        id=check.id,
        title=check.title,
        source=check.source,
        status=outcome.status,
        text=outcome.text,
        advice=outcome.advice,
        evidence=outcome.evidence,
    )
