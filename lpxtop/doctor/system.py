"""Checks of the host around the GPUs: limits, memory, CPU, ports, keys left lying about, a baseline. Reads files only.

A key found is never repeated: only where it lies.
"""

import re
from itertools import islice

from lpxtop.doctor.node import Node, Process
from lpxtop.doctor.results import Check, Outcome, failed, noted, passed, skipped, warned
from lpxtop.errors import RecordingError
from lpxtop.format import bytes_iec
from lpxtop.recording.catalogue import SUFFIXES
from lpxtop.recording.reader import Recording

HEADROOM_FILES = 64
LOW_FILES = 4096
LOW_SHM = 1 << 30
MOST_RECORDINGS = 200
_KEY_FLAG = re.compile(r"--?(?:api[-_]?key|auth[-_]?token|hf[-_]?token|token)(?:=(.+))?$", re.IGNORECASE)
_KEY_SHAPE = re.compile(r"\b(?:sk|gsk|hf|nvapi|xai|csk)[-_][A-Za-z0-9_-]{16,}")
_SUFFIX = {"k": 1024, "m": 1024**2, "g": 1024**3}


def shm(node: Node) -> Outcome:
    size = _shm_bytes(node)
    if size is None:
        return skipped("no shared memory is to be seen here", "df -h /dev/shm")
    if size < LOW_SHM and node.in_container and len(node.nvml.cards) > 1:
        return warned(f"shared memory has {bytes_iec(size)}: NCCL between {len(node.nvml.cards)} GPUs will fail",
                      "docker run --ipc=host, or --shm-size 16g", bytes=size)  # fmt: skip
    return passed(f"shared memory has {bytes_iec(size)}", bytes=size)


def _shm_bytes(node: Node) -> int | None:
    """The tmpfs's size option; without one it is half of the memory (tmpfs(5))."""
    mount = re.search(r"^\S+ /dev/shm tmpfs (\S+)", node.read("proc/self/mounts") or "", re.MULTILINE)
    if not mount:
        return None
    size = re.search(r"(?:^|,)size=(\d+)([kmg]?)", mount.group(1))
    if size:
        return int(size.group(1)) * _SUFFIX.get(size.group(2), 1)
    total = re.search(r"MemTotal:\s+(\d+) kB", node.read("proc/meminfo") or "")
    return int(total.group(1)) * 1024 // 2 if total else None


def _limit(node: Node, name: str) -> int | None:
    """A soft limit of this process; None when unknown. Unlimited is 2⁶³."""
    found = re.search(rf"^{name}\s+(\d+|unlimited)", node.read("proc/self/limits") or "", re.MULTILINE)
    if not found:
        return None
    return 2**63 if found.group(1) == "unlimited" else int(found.group(1))


def open_files(node: Node) -> Outcome:
    limit = _limit(node, "Max open files")
    if limit is None:
        return skipped("the limit is not told here", "ulimit -n")
    advice = "ulimit -n 65535; for good: nofile in /etc/security/limits.conf, LimitNOFILE= of the service"
    if limit < node.concurrency + HEADROOM_FILES:
        return failed(f"{limit} open files: too few for {node.concurrency} connections", advice, limit=limit)
    if limit < LOW_FILES:
        return warned(f"{limit} open files: few for a server or for high concurrency", advice, limit=limit)
    return passed("no limit of open files" if limit == 2**63 else f"{limit} open files", limit=limit)


def locked_memory(node: Node) -> Outcome:
    limit = _limit(node, "Max locked memory")
    if not node.glob("sys/class/infiniband/*"):
        return skipped("no InfiniBand or RoCE here: nothing needs it")
    if limit is not None and limit < 2**31:
        return warned(f"RDMA is here and only {bytes_iec(limit)} may be locked", "ulimit -l unlimited; docker run "
                      "--ulimit memlock=-1", limit=limit)  # fmt: skip
    return passed("enough memory may be locked") if limit is not None else skipped("the limit is not told", "ulimit -l")


def ports(node: Node) -> Outcome:
    found = (node.line("proc/sys/net/ipv4/ip_local_port_range") or "").split()
    if len(found) != 2 or not all(part.isdecimal() for part in found):
        return skipped("not told here", "sysctl net.ipv4.ip_local_port_range")
    number = int(found[1]) - int(found[0]) + 1
    if number < 4 * node.concurrency:
        return warned(f"{number} local ports for {node.concurrency} connections",
                      "sysctl -w net.ipv4.ip_local_port_range='1024 65535'; keep-alive is the better cure")  # fmt: skip
    return passed(f"{number} local ports", ports=number)


def cpu(node: Node) -> Outcome:
    cores = len(node.glob("sys/devices/system/cpu/cpu[0-9]*")) or None
    governor = node.line("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    load = (node.line("proc/loadavg") or "").split(" ")[0]
    throttled = _throttled(node)
    evidence = {"cores": cores, "governor": governor, "load_1min": load or None, "cgroup_throttled": throttled}
    if throttled is not None and throttled > 0.05:
        return warned(
            f"this container is held back in {throttled:.0%} of its CPU periods",
            "raise its CPU limit (cpu.max): a starved engine loop looks like an idle GPU",
            **evidence,
        )
    if cores and _is_number(load) and float(load) > 1.5 * cores:
        return warned(f"load {load} on {cores} cores: client and engine wait for the CPU", "top; pin or move what "
                      "runs beside", **evidence)  # fmt: skip
    if governor == "powersave" and node.line("sys/devices/system/cpu/cpu0/cpufreq/scaling_driver") != "intel_pstate":
        return warned("CPU governor powersave: slow clocks under bursts", "sudo cpupower frequency-set -g performance",
                      **evidence)  # fmt: skip
    return passed(f"{cores or 'unknown number of'} cores, load {load or 'not told'}"
                  + (f", governor {governor}" if governor else ""), **evidence)  # fmt: skip


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(?:\.\d+)?", text) is not None


def _throttled(node: Node) -> float | None:
    """Share of CPU periods in which the cgroup was throttled since it began."""
    found = dict(re.findall(r"^(nr_\w+) (\d+)", node.read("sys/fs/cgroup/cpu.stat") or "", re.MULTILINE))
    periods = int(found.get("nr_periods", "0"))
    return int(found.get("nr_throttled", "0")) / periods if periods else None


def numa(node: Node) -> Outcome:
    nodes = {gpu: node.number(f"sys/bus/pci/devices/{gpu}/numa_node") for gpu in node.pci_gpus}
    known = {gpu: where for gpu, where in nodes.items() if where is not None and where >= 0}
    if not known or len(node.glob("sys/devices/system/node/node[0-9]*")) < 2:
        return skipped("one NUMA node, or not told")
    text = ", ".join(f"{gpu} on node {where}" for gpu, where in known.items())
    return noted(text, "numactl --cpunodebind=N --membind=N for an engine with one GPU", **nodes)


def memory(node: Node) -> Outcome:
    pressure = re.search(r"^full avg10=([\d.]+)", node.read("proc/pressure/memory") or "", re.MULTILINE)
    sizes = {n: int(kb) * 1024 for n, kb in re.findall(r"^(\w+):\s+(\d+) kB", node.read("proc/meminfo") or "", re.M)}
    total, free = sizes.get("MemTotal"), sizes.get("MemAvailable")
    evidence = {"total": total, "available": free, "full_avg10": float(pressure.group(1)) if pressure else None}
    if pressure and float(pressure.group(1)) > 0:
        return warned(f"everything stood still for memory {pressure.group(1)} % of the last 10 s",
                      "free memory: ps aux --sort=-rss | head", **evidence)  # fmt: skip
    if total and free is not None and free < 0.05 * total:
        return warned(f"{bytes_iec(free)} of {bytes_iec(total)} memory left", "ps aux --sort=-rss | head", **evidence)
    if total is None or free is None:
        return skipped("memory is not told here", "free -h")
    return passed(f"{bytes_iec(free)} of {bytes_iec(total)} memory available", **evidence)


def wsl(node: Node) -> Outcome:
    if not node.is_wsl:
        return skipped("not WSL")
    return noted("WSL: processes, XIDs and some limits are not reported", "the Windows host's nvidia-smi has them")


def jetson(node: Node) -> Outcome:
    if not node.is_jetson:
        return skipped("no Jetson")
    model = (node.read("proc/device-tree/model") or "").strip("\0\n ") or "a Jetson"
    return noted(f"{model}: NVML answers little here", "tegrastats shows the rest")


# --- before launch -------------------------------------------------------------------------------------------------


def keys(node: Node) -> Outcome:
    """The endpoint's key, or what looks like one, on a command line or in another user's environment."""
    own = [p for p in node.processes if node.key and any(node.key in word for word in p.command)]
    if own:
        return failed(
            f"the endpoint's key is on the command line of {_named(own)}: every user can read it",
            "give it by a file or the environment; then change the key",
            pids=[p.pid for p in own],
        )
    spread = [p for p in node.processes if node.key and p.uid != node.uid and _holds(node, p, node.key)]
    if spread:
        return failed(f"the endpoint's key is in the environment of another user's {_named(spread)}",
                      "start those without it; then change the key", pids=[p.pid for p in spread])  # fmt: skip
    alike = [p for p in node.processes if _tells_a_key(p)]
    if alike:
        return warned(
            f"what looks like a key is on the command line of {_named(alike)}: every user can read it",
            "vLLM reads VLLM_API_KEY, most programs a file or a variable",
            pids=[p.pid for p in alike],
        )
    whose = "" if node.uid == 0 else " (other users' environments are readable by root only)"
    return passed(f"no key on the {len(node.processes)} command lines that can be seen{whose}")


def _named(found: list[Process]) -> str:
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(f"{process.name} (pid {process.pid})" for process in found[:3]) + more


def _holds(node: Node, process: Process, key: str) -> bool:
    return key in (node.read(f"proc/{process.pid}/environ") or "")


def _tells_a_key(process: Process) -> bool:
    for place, word in enumerate(process.command):
        if _KEY_SHAPE.search(word):
            return True
        flag = _KEY_FLAG.match(word)
        value = flag and (flag.group(1) or (process.command[place + 1] if place + 1 < len(process.command) else ""))
        if value and not value.startswith(("-", "$", "/")) and value.lower() not in ("none", "empty", "dummy"):
            return True
    return False


def baseline(node: Node) -> Outcome:
    if node.recordings is None:
        return skipped("no place for recordings is known")
    make = "lpxtop run URL --headless -c 8 -n 200 keeps one; later: lpxtop compare BASELINE NEW"
    headers = list(filter(None, (_header(path) for path in islice(_recordings(node), MOST_RECORDINGS))))
    if node.url is None:
        mine = [path for path, _ in headers]
        where = "of any endpoint"
    else:
        mine = [path for path, url in headers if url == node.url]
        where = "of this endpoint"
    if not mine:
        return warned(f"no recording {where} to compare with when it is slow one day", make)
    return passed(f"{len(mine)} recording(s) {where}, the newest {mine[0]}")


def _recordings(node: Node) -> list[str]:
    """Paths of the user's recordings, newest first."""
    assert node.recordings is not None
    found = [path for path in node.recordings.glob("*") if path.name.endswith(SUFFIXES)]
    return [str(path) for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]


def _header(path: str) -> tuple[str, str | None] | None:
    """(path, the endpoint's URL) of a real endpoint's recording."""
    try:
        header = Recording.open(path).header
    except (RecordingError, OSError):
        return None
    return None if header.simulated else (path, header.target.get("url"))


CHECKS: tuple[Check[Node], ...] = (
    Check("sys.shm", "Shared memory", "/proc/self/mounts", "warn < 1 GiB, container, 2 GPUs or more", shm),
    Check("sys.nofile", "Open files", "/proc/self/limits", "fail < concurrency + 64, warn < 4096", open_files),
    Check("sys.memlock", "Locked memory", "/proc/self/limits", "warn if small and RDMA is here", locked_memory),
    Check("sys.ports", "Local ports", "/proc/sys/net/ipv4/ip_local_port_range", "warn < 4 × connections", ports),
    Check("sys.cpu", "CPU", "loadavg, cpufreq, cgroup cpu.stat", "warn if overloaded or held back", cpu),
    Check("sys.numa", "NUMA", "/sys/…/numa_node", "told only", numa, "gpu"),
    Check("sys.memory", "Memory and swap", "/proc/meminfo, /proc/pressure/memory", "warn under pressure", memory),
    Check("plat.wsl", "WSL", "/proc/version", "told only", wsl),
    Check("plat.jetson", "Jetson", "/etc/nv_tegra_release", "told only", jetson),
    Check("launch.keys", "No key lies about", "/proc/*/cmdline, environ", "fail if this endpoint's", keys),
    Check("launch.baseline", "A baseline exists", "recordings", "warn if none", baseline),
)  # fmt: skip
