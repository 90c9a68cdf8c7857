"""Checks of the GPUs' settings, power, heat, clocks and links, by what NVML says.

A check that needs load to be sure says so. Must not set anything.
"""

import re

from lpxtop.doctor.card import Card
from lpxtop.doctor.each import each_gpu, row
from lpxtop.doctor.node import Node
from lpxtop.doctor.results import Check, Outcome, failed, noted, passed, skipped, warned

BUSY_PERCENT = 50
SEEN_BITS = {0x4: "power wall", 0x20: "thermal wall", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
"""Clock event bits that mean throttled; 0x1, 0x2 and 0x100 (idle, settings, display) do not."""
HARD_BITS = 0x40 | 0x80
HARDWARE_SLOWDOWN = 0x8


# --- settings ------------------------------------------------------------------------------------------------------


def persistence(node: Node) -> Outcome:
    if node.is_wsl:
        return skipped("WSL: the Windows driver stays loaded")
    return each_gpu(_persistence, "the driver does not say")(node)


def _persistence(card: Card) -> Outcome | None:
    on = card.row.get("persistence")
    if on is None:
        return None
    if on:
        return passed("persistence mode is on", persistence=True)
    return warned(
        "persistence mode is off: the first request after idle waits for the driver",
        "sudo systemctl enable --now nvidia-persistenced (or sudo nvidia-smi -pm 1)",
        persistence=False,
    )


def _compute_mode(card: Card) -> Outcome | None:
    mode = card.row.get("compute_mode")
    if mode is None:
        return None
    reset = f"sudo nvidia-smi -i {card.row.get('index', 0)} -c 0"
    if mode == "prohibited":
        return failed("compute mode is PROHIBITED: no program can use it", reset, mode=mode)
    if mode == "exclusive_process" and card.processes:
        return warned("compute mode is EXCLUSIVE_PROCESS and a process has it: a second cannot start", reset, mode=mode)
    return passed(f"compute mode {mode}", mode=mode)


def _mig(card: Card) -> Outcome | None:
    mig = card.row.get("mig")
    if mig is None:
        return None
    if mig["current"] != mig["pending"]:
        return warned(
            f"MIG is {on_off(mig['current'])} and becomes {on_off(mig['pending'])} with the next reset",
            f"stop its programs, then sudo nvidia-smi --gpu-reset -i {card.row.get('index', 0)}",
            **mig,
        )
    if mig["current"]:
        return noted("MIG is on", "utilisation is not reported then; memory is per instance", **mig)
    return passed("MIG is off", **mig)


def on_off(state: bool) -> str:
    return "on" if state else "off"


def _power_limit(card: Card) -> Outcome | None:
    limit, default = card.row.get("power_limit_watts"), card.row.get("power_limit_default_watts")
    if not limit or not default:
        return None
    evidence = {"limit_watts": limit, "default_watts": default,
                "requested_watts": card.row.get("power_limit_requested_watts")}  # fmt: skip
    if limit >= 0.9 * default:
        return passed(f"power limit {limit:.0f} W (default {default:.0f} W)", **evidence)
    requested = evidence["requested_watts"]
    advice = f"sudo nvidia-smi -i {card.row.get('index', 0)} -pl {default:.0f}"
    if requested is not None and limit < requested:
        advice = "the chassis or BMC caps it below what was set: look at its power policy"
    return warned(
        f"power limit {limit:.0f} W, {limit / default:.0%} of the default {default:.0f} W", advice, **evidence
    )


# --- now -----------------------------------------------------------------------------------------------------------


def _power_now(card: Card) -> Outcome | None:
    power, limit = card.now.get("power_watts"), card.now.get("power_limit_watts") or card.row.get("power_limit_watts")
    if power is None or not limit:
        return None
    capped = bool((card.now.get("throttle_bits") or 0) & 0x4)
    if power >= 0.97 * limit and capped:
        return warned(
            f"at the power wall: {power:.0f} of {limit:.0f} W",
            "prefill is slower than the chip could; raise the limit if power and cooling allow",
            power_watts=power,
            limit_watts=limit,
        )
    return passed(f"{power:.0f} of {limit:.0f} W now", power_watts=power, limit_watts=limit)


def _thermal(card: Card) -> Outcome | None:
    temperature, margin = card.now.get("temperature_c"), card.now.get("thermal_margin_c")
    bits = card.now.get("throttle_bits") or 0
    if temperature is None and margin is None:
        return None
    text = f"{temperature:.0f} °C" if temperature is not None else "temperature not told"
    text += f", {margin:.0f} °C below the slowdown" if margin is not None else ""
    evidence = {"temperature_c": temperature, "margin_c": margin, "throttle_bits": bits}
    advice = "airflow, fans, dust, inlet temperature; compare with its neighbours: nvidia-smi -q -d TEMPERATURE"
    if bits & 0x40:
        return failed(f"too hot: the hardware cut the clocks ({text})", advice, **evidence)
    if margin is not None and margin <= 5:
        return warned(text, advice, **evidence)
    return passed(text, **evidence)


def _throttle(card: Card) -> Outcome | None:
    bits, earlier = card.now.get("throttle_bits"), card.before.get("throttle_bits")
    if bits is None:
        return None
    grown = _grown(card)
    named = [word for bit, word in SEEN_BITS.items() if bits & bit] + grown
    evidence = {"throttle_bits": bits, "seconds": card.seconds, "grown": grown}
    if bits & HARDWARE_SLOWDOWN and (earlier or 0) & HARDWARE_SLOWDOWN and not bits & HARD_BITS:
        named.append("hardware slowdown")
    if not named:
        return passed("not throttled", **evidence)
    words = ", ".join(dict.fromkeys(named))
    advice = "power wall: gpu.power.limit; heat: airflow and fans; power brake: the power supply or the rack"
    hard = bits & HARD_BITS or "hardware slowdown" in named or "power brake" in grown
    return (failed if hard else warned)(f"clocks are held down: {words}", advice, **evidence)


_COUNTED = {"power_cap": "power wall", "thermal": "thermal wall", "hw_thermal": "hardware thermal slowdown",
            "power_brake": "power brake"}  # fmt: skip


def _grown(card: Card) -> list[str]:
    """Reasons whose counters moved by more than a tenth of the time between the samples: dips no mask shows."""
    before, now = card.before.get("throttle_ns") or {}, card.now.get("throttle_ns") or {}
    if not card.seconds:
        return []
    least = 0.1 * card.seconds * 1e9
    return [
        word
        for reason, word in _COUNTED.items()
        if before.get(reason) is not None and now.get(reason) is not None and now[reason] - before[reason] > least
    ]


def _clocks(card: Card) -> Outcome | None:
    clock, most = card.now.get("sm_clock_mhz"), card.row.get("sm_clock_max_mhz")
    if clock is None or not most:
        return None
    pinned = card.row.get("sm_clock_application_mhz")
    evidence = {"sm_clock_mhz": clock, "max_mhz": most, "application_mhz": pinned}
    busy = (card.now.get("utilization_percent") or 0) >= BUSY_PERCENT
    throttled = (card.now.get("throttle_bits") or 0) & (0x4 | 0x8 | 0x20 | HARD_BITS)
    if busy and clock < 0.8 * most and not throttled:
        return warned(
            f"{clock} of {most} MHz under load and nothing throttles it: the clocks are locked lower",
            "sudo nvidia-smi -rgc; sudo nvidia-smi -rmc; sudo nvidia-smi -rac",
            **evidence,
        )
    return passed(f"{clock} MHz now, up to {most} MHz" + ("" if busy else " (idle: locked clocks cannot be told)"),
                  **evidence)  # fmt: skip


# --- the link ------------------------------------------------------------------------------------------------------


def _pcie(card: Card) -> Outcome | None:
    width, most = card.now.get("pcie_width"), card.row.get("pcie_width_max")
    generation, newest = card.now.get("pcie_generation"), card.row.get("pcie_generation_max")
    if not width or not most:
        return None
    text = f"PCIe gen {generation or '?'} x{width} (gen {newest or '?'} x{most})"
    evidence = {"width": width, "width_max": most, "generation": generation, "generation_max": newest}
    advice = "reseat the card; slot and bifurcation in the BIOS; riser; sudo lspci -vv | grep -i lnksta"
    if width < most:
        return warned(f"{text}: fewer lanes than it could have", advice, **evidence)
    busy = (card.now.get("utilization_percent") or 0) >= BUSY_PERCENT
    if busy and generation and newest and generation < newest:
        return warned(f"{text}: a slower link than it could have, under load", advice, **evidence)
    return passed(text, **evidence)


def acs(node: Node) -> Outcome:
    if len(node.nvml.cards) < 2:
        return skipped("one GPU: nothing goes from GPU to GPU")
    command = node.read("proc/cmdline") or ""
    on = re.search(r"\b(?:intel|amd)_iommu=on\b", command) and not re.search(r"\biommu=pt\b", command)
    check = "sudo lspci -vvv | grep -i acsctl (SrcValid+ slows peer-to-peer on PCIe)"
    if on:
        return warned("the IOMMU translates (no iommu=pt): peer-to-peer over PCIe may be slow or hang", check)
    return noted("no sign of an IOMMU in the way; the ACS bits are readable by root only", check)


CHECKS: tuple[Check[Node], ...] = (
    Check("gpu.persistence", "Persistence mode", "NVML", "warn if off", persistence, "nvml"),
    row("gpu.computemode", "Compute mode", "NVML", "fail if prohibited", each=_compute_mode),
    row("gpu.mig", "MIG mode", "NVML", "warn if a change is pending", each=_mig, untold="these GPUs have no MIG"),
    row("gpu.power.limit", "Power limit", "NVML", "warn under 90 % of the default", each=_power_limit),
    row("gpu.power.now", "Power below limit", "NVML", "warn at 97 % and capped", each=_power_now),
    row("gpu.thermal", "Temperature below limit", "NVML", "warn 5 °C below, fail when cut", each=_thermal),
    row("gpu.throttle", "Not throttled", "NVML mask and counters over 1 s", "fail 0x40, 0x80, lasting 0x8; warn 0x4, "
         "0x20", each=_throttle),
    row("gpu.clocks.locked", "Clocks not locked", "NVML", "warn if low under load without a reason", each=_clocks),
    row("gpu.pcie", "PCIe link", "NVML", "warn if narrow, or slow under load", each=_pcie, untold="no PCIe link"),
    Check("gpu.acs", "Peer-to-peer path", "/proc/cmdline", "warn if the IOMMU translates", acs, "nvml"),
)  # fmt: skip
