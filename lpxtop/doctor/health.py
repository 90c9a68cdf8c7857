"""Checks of the GPUs' health and of who uses them: memory errors, XIDs, processes, visibility, the fabric.

Reads only.
"""

import os
import re
from typing import Any

from lpxtop.doctor.card import Card
from lpxtop.doctor.each import row
from lpxtop.doctor.gpu import on_off
from lpxtop.doctor.node import Node
from lpxtop.doctor.results import Check, Outcome, failed, noted, passed, skipped, warned, worst
from lpxtop.format import bytes_iec
from lpxtop.probes import xid

FATAL_XIDS = {48, 64, 79, 95, 119, 120, 140, 143}
SERIOUS_XIDS = {63, 74, 92, 94, 154}
UNEXPLAINED_BYTES = 1 << 30


# --- memory --------------------------------------------------------------------------------------------------------


def _ecc(card: Card) -> Outcome | None:
    mode, health = card.row.get("ecc"), card.health
    bad = health.get("ecc_uncorrected")
    if mode is None and bad is None:
        return None
    evidence = {"ecc": mode, "uncorrected": bad, "corrected": health.get("ecc_corrected")}
    if bad:
        return failed(
            f"{bad} uncorrected memory error(s) since the driver was loaded",
            "stop its programs and reset it: sudo nvidia-smi --gpu-reset -i INDEX; if they come back: RMA",
            **evidence,
        )
    if mode and mode["current"] != mode["pending"]:
        return warned(
            f"ECC is {on_off(mode['current'])} and changes with the next reset", "reset or reboot", **evidence
        )
    return passed(f"ECC {on_off(mode['current']) if mode else 'state not told'}, no uncorrected errors", **evidence)


def _remap(card: Card) -> Outcome | None:
    health = card.health
    known = {n: health[n] for n in ("remap_pending", "remap_failure", "retired_pages_pending") if n in health}
    if not known:
        return None
    if known.get("remap_failure"):
        return failed("row remapping failed: the memory is worn out", "take it out of service: RMA", **known)
    if known.get("remap_pending") or known.get("retired_pages_pending"):
        return warned("memory rows wait to be remapped", "reset the GPU in a quiet moment", **known)
    return passed("no memory repair is pending", **known)


def _recovery(card: Card) -> Outcome | None:
    action = card.health.get("recovery_action")
    if action:
        return failed(f"the driver asks for a recovery: {action}", f"drain this node, then: {action}", action=action)
    return passed("the driver asks for no recovery") if card.health else None


def xids(node: Node) -> Outcome:
    text = _kernel_log(node)
    if text is None:
        return skipped("the kernel log cannot be read without root", "sudo dmesg -T | grep -i xid")
    numbers = [int(number) for number in re.findall(r"NVRM: Xid \([^)]*\): (\d+)", text)]
    if not numbers:
        return passed("no XID in the kernel log")
    counted = {number: numbers.count(number) for number in dict.fromkeys(numbers)}
    words = "; ".join(f"XID {n} ×{k} ({xid.MEANING.get(n, 'see NVIDIA catalogue')})" for n, k in counted.items())
    evidence = {"xids": {str(number): times for number, times in counted.items()}}
    advice = "sudo dmesg -T | grep -i xid; lpxtop explain 'XID " + str(min(counted, key=_severity)) + "'"
    if set(counted) & FATAL_XIDS:
        return failed(words, advice, **evidence)
    if set(counted) - xid.APPLICATION:
        return warned(words, advice, **evidence)
    return noted(f"only what applications cause: {words}", advice, **evidence)


def _severity(number: int) -> int:
    return 0 if number in FATAL_XIDS else 1 if number in SERIOUS_XIDS else 2


def _kernel_log(node: Node) -> str | None:
    """The ring buffer without waiting for more; None when it must not be read."""
    try:
        descriptor = os.open(node.path("dev/kmsg"), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    parts: list[bytes] = []
    try:
        for _ in range(100_000):
            try:
                part = os.read(descriptor, 8192)
            except BrokenPipeError:  # a record was overwritten meanwhile: the next read goes on
                continue
            except OSError:
                break
            if not part:
                break
            parts.append(part)
    finally:
        os.close(descriptor)
    return b"".join(parts).decode("utf-8", "replace")


# --- who uses it ---------------------------------------------------------------------------------------------------


def processes(node: Node) -> Outcome:
    return worst([_holders(node, card) for card in node.nvml.cards])


def _holders(node: Node, card: Card) -> Outcome:
    held = card.processes
    if held is None:
        return skipped(f"{card.label}: the driver does not list processes here")
    named = [f"{process['pid']} {process.get('name', '')}".strip() for process in held]
    stuck = _stuck(node, held)
    if stuck:
        return warned(
            f"{card.label}: {', '.join(stuck)} holds memory and is dead or stuck",
            "a zombie goes with its parent; a process in state D needs a reboot: ps -o pid,stat,wchan,comm -p PID",
        )
    used = card.now.get("memory_used_bytes")
    if not held and used is not None and used > UNEXPLAINED_BYTES and not card.row.get("unified_memory"):
        return warned(
            f"{card.label}: {bytes_iec(used)} in use and no process to be seen",
            "it may be in another container or a crashed one: on the host, sudo fuser -v /dev/nvidia*",
            memory_used_bytes=used,
        )
    return passed(f"{card.label}: {', '.join(named) or 'free'}", processes=held)


def _stuck(node: Node, held: list[dict[str, Any]]) -> list[str]:
    if not node.hosts_pid_namespace:
        return []
    states = {process.pid: process for process in node.processes}
    return [
        f"{p.name} ({p.pid}, state {p.state})"
        for process in held
        if (p := states.get(process["pid"])) is not None and p.state in ("D", "Z")
    ]


def runtime_pm(node: Node) -> Outcome:
    states = {gpu: node.line(f"sys/bus/pci/devices/{gpu}/power/runtime_status") for gpu in node.pci_gpus}
    asleep = [gpu for gpu, state in states.items() if state == "suspended"]
    if asleep:
        return noted(
            f"asleep: {', '.join(asleep)}; not woken for this", "lpxtop --gpu nvml:0 reads it anyway", **states
        )
    return passed("awake") if any(states.values()) else skipped("the kernel does not say")


def _unified(card: Card) -> Outcome | None:
    if card.row.get("unified_memory"):
        return noted("memory is shared with the system", "memory figures are the whole system's")
    return passed("memory of its own")


def visible(node: Node) -> Outcome:
    text = node.variables.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return passed("CUDA_VISIBLE_DEVICES is not set: all GPUs")
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    uuids = [str(card.row.get("uuid", "")) for card in node.nvml.cards]
    wrong = [entry for entry in entries if not _names_one(entry, uuids)]
    if not entries or wrong:
        return warned(
            f"CUDA_VISIBLE_DEVICES={text[:60]}: " + (f"{wrong[0]} names no GPU here" if wrong else "hides every GPU"),
            "nvidia-smi -L lists them; CUDA ignores everything after the first wrong entry",
        )
    mixed = len({card.row.get("name") for card in node.nvml.cards}) > 1
    if (
        mixed
        and any(entry.isdecimal() for entry in entries)
        and node.variables.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    ):
        return warned("GPU numbers mean another order to CUDA than to nvidia-smi here (different models)",
                      "export CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID")  # fmt: skip
    return passed(f"CUDA_VISIBLE_DEVICES={text[:60]} names GPUs that are here")


def _names_one(entry: str, uuids: list[str]) -> bool:
    if entry.isdecimal():
        return int(entry) < len(uuids)
    if entry.startswith("MIG-"):
        return True
    return entry.startswith("GPU-") and sum(uuid.lower().startswith(entry.lower()) for uuid in uuids) == 1


def fabric(node: Node) -> Outcome:
    if not node.nvswitches:
        return skipped("no NVSwitch here")
    running = any(process.name.startswith("nv-fabricmanage") for process in node.processes)
    if running:
        return passed(f"{len(node.nvswitches)} NVSwitch(es), fabric manager runs")
    if node.in_container:
        return skipped(
            "NVSwitches here; the fabric manager runs outside this container",
            "on the host: systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A2 Fabric",
        )
    return failed("NVSwitches and no fabric manager: CUDA will not start (error 802)",
                  "sudo systemctl enable --now nvidia-fabricmanager (same version as the driver)")  # fmt: skip


CHECKS: tuple[Check[Node], ...] = (
    row("gpu.ecc", "Memory errors", "NVML", "fail if uncorrected", each=_ecc, untold="these GPUs have no ECC"),
    row("gpu.remap", "Memory repair", "NVML", "fail if failed, warn if pending", each=_remap),
    row("gpu.recovery", "Recovery action", "NVML field 230", "fail if one is asked for", each=_recovery),
    Check("gpu.xid", "XID errors", "/dev/kmsg", "fail 48 64 79 95 119 120 140 143, warn others but applications'", xids,
          "gpu"),
    Check("gpu.processes", "Processes on the GPUs", "NVML, /proc", "warn if dead, stuck or unseen", processes, "nvml"),
    Check("gpu.runtime_pm", "Runtime power management", "/sys/…/power/runtime_status", "told only", runtime_pm, "gpu"),
    row("gpu.unified", "Unified memory", "NVML", "told only", each=_unified),
    Check("gpu.visible", "CUDA_VISIBLE_DEVICES", "environment", "warn if it names no GPU", visible, "nvml"),
    Check("gpu.fabric", "Fabric manager", "PCI class 0x0680, /proc", "fail if NVSwitches and none", fabric, "gpu"),
)  # fmt: skip
