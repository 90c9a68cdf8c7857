"""This host as the checks see it: files under a root, the environment, processes, and what NVML answered.

Reads only. Tests give a root of their own and an NVML answer. Must not judge.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lpxtop.doctor.card import NvmlAnswer

MOST_PROCESSES = 5000
MOST_BYTES = 1 << 20
_ENGINE = re.compile(
    r"(?:^|[/\s])(?:-m\s+)?(vllm|sglang|tritonserver|trtllm-serve|text-generation-(?:launcher|server)|llama-server|"
    r"lmdeploy|ollama|nim_llm)(?=[\s.:/]|$)"
)
_CONTAINER = re.compile(r"(?:docker|containerd|crio|libpod|/)[-/:]?([0-9a-f]{64})")


@dataclass(frozen=True)
class Process:
    """A process of /proc. `command` is its argument vector, `cgroup` the text of its cgroup file."""

    pid: int
    name: str
    uid: int
    state: str
    command: tuple[str, ...]
    cgroup: str

    @property
    def engine(self) -> str | None:
        """Which inference server this is, by its command line; None for other programs."""
        # the program and what it is asked to run; a prompt further on may name an engine too
        found = _ENGINE.search(" ".join(self.command[:4]))
        return found.group(1) if found else None

    @property
    def container(self) -> str | None:
        """The container's short id, from the cgroup."""
        found = _CONTAINER.search(self.cgroup)
        return found.group(1)[:12] if found else None


@dataclass
class Node:
    """A host. `uid` is whose eyes these are; `linker_says` loads NVML and gives the loader's complaint, if any."""

    root: Path = Path("/")
    variables: Mapping[str, str] = field(default_factory=dict)
    nvml: NvmlAnswer = field(default_factory=NvmlAnswer)
    uid: int = field(default_factory=lambda: os.getuid() if hasattr(os, "getuid") else -1)
    key: str | None = field(default=None, repr=False)
    recordings: Path | None = None
    url: str | None = None
    concurrency: int = 1
    linker_says: Callable[[], str | None] = lambda: None

    # --- files -------------------------------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        return self.root / name

    def read(self, name: str) -> str | None:
        """A file's text, at most 1 MiB of it; None when it is not there or must not be read."""
        try:
            with self.path(name).open("rb") as file:
                return file.read(MOST_BYTES).decode("utf-8", "replace")
        except OSError:
            return None

    def line(self, name: str) -> str | None:
        """`read` without white space around it."""
        text = self.read(name)
        return None if text is None else text.strip()

    def number(self, name: str) -> int | None:
        """A file that holds one integer."""
        text = self.line(name) or ""
        return int(text) if re.fullmatch(r"-?\d+", text) else None

    def exists(self, name: str) -> bool:
        try:
            return self.path(name).exists()
        except OSError:
            return False

    def glob(self, pattern: str) -> list[Path]:
        """Files by pattern, sorted; [] where the directory cannot be read."""
        try:
            return sorted(self.root.glob(pattern))
        except OSError:
            return []

    # --- what is in the host -----------------------------------------------------------------------------------

    @cached_property
    def pci_gpus(self) -> list[str]:
        """PCI addresses of NVIDIA display controllers (class 0x03xxxx)."""
        return self._nvidia_pci("0x03")

    @cached_property
    def nvswitches(self) -> list[str]:
        """PCI addresses of NVSwitches: NVIDIA bridges of class 0x0680."""
        return self._nvidia_pci("0x0680")

    def _nvidia_pci(self, kind: str) -> list[str]:
        return [
            device.name
            for device in self.glob("sys/bus/pci/devices/*")
            if self.line(f"sys/bus/pci/devices/{device.name}/vendor") == "0x10de"
            and (self.line(f"sys/bus/pci/devices/{device.name}/class") or "").startswith(kind)
        ]

    @cached_property
    def modules(self) -> set[str]:
        """Names of loaded kernel modules."""
        return {line.split()[0] for line in (self.read("proc/modules") or "").splitlines() if line.strip()}

    @cached_property
    def driver_version(self) -> str | None:
        """The loaded kernel module's version."""
        found = re.search(
            r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", self.read("proc/driver/nvidia/version") or ""
        )
        return found.group(1) if found else self.line("sys/module/nvidia/version")

    @property
    def is_wsl(self) -> bool:
        return "microsoft" in (self.read("proc/version") or "").lower()

    @property
    def is_jetson(self) -> bool:
        return self.exists("etc/nv_tegra_release")

    @property
    def in_container(self) -> bool:
        """Whether these eyes look from inside a container."""
        return (
            self.exists(".dockerenv")
            or self.exists("run/.containerenv")
            or "KUBERNETES_SERVICE_HOST" in self.variables
            or bool(_CONTAINER.search(self.read("proc/1/cgroup") or ""))
        )

    @property
    def has_gpu(self) -> bool:
        return bool(self.pci_gpus or self.nvml.cards or (self.is_wsl and self.exists("usr/lib/wsl/lib/libcuda.so.1")))

    def lacks(self, need: str) -> str | None:
        """Why a check that needs `gpu` or `nvml` cannot be made; None when it can."""
        if need and not self.has_gpu:
            return "no NVIDIA GPU here"
        if need == "nvml" and not self.nvml.cards:
            return "NVML gives no readings (see nvml.loadable)"
        return None

    # --- processes ---------------------------------------------------------------------------------------------

    @cached_property
    def processes(self) -> list[Process]:
        """Processes that can be seen, at most 5000."""
        try:
            pids = sorted(int(name) for name in os.listdir(self.root / "proc") if name.isdecimal())
        except OSError:
            return []
        return [process for pid in pids[:MOST_PROCESSES] if (process := self._process(pid)) is not None]

    def _process(self, pid: int) -> Process | None:
        status = self.read(f"proc/{pid}/status")
        if status is None:
            return None
        fields = dict(re.findall(r"^(\w+):\s+(\S+)", status, re.MULTILINE))
        command = (self.read(f"proc/{pid}/cmdline") or "").rstrip("\0").split("\0")
        cgroup = self.read(f"proc/{pid}/cgroup") or ""
        uid = int(fields["Uid"]) if fields.get("Uid", "").isdecimal() else -1
        return Process(pid, fields.get("Name", ""), uid, fields.get("State", ""), tuple(filter(None, command)), cgroup)

    @property
    def engines(self) -> list[Process]:
        """Inference servers among the processes."""
        return [process for process in self.processes if process.engine]

    @property
    def hosts_pid_namespace(self) -> bool:
        """Whether PIDs here are the host's: NVML counts in those (PROC_PID_INIT_INO is the same in every kernel)."""
        try:
            return str(self.path("proc/self/ns/pid").readlink()) == "pid:[4026531836]"
        except OSError:
            return False


def loader_complaint() -> str | None:
    """What the dynamic loader says about NVML; None when it loads. The binding hides this sentence."""
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return str(error)
    return None
