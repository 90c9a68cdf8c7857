"""What /proc and /sys say about this host and its NVIDIA GPUs, without waking or opening one. Reads files only."""

import re
from pathlib import Path


class Host:
    """This host. `root` is where /proc, /sys and /etc hang; tests give their own."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def is_wsl(self) -> bool:
        return "microsoft" in self._read("proc/version").lower()

    def is_jetson(self) -> bool:
        """A Jetson board: NVML answers little there, or with zeros."""
        return (self._root / "etc/nv_tegra_release").exists()

    def gpus_asleep(self) -> bool:
        """Whether there are NVIDIA GPUs and all of them are suspended."""
        states = [
            _text(device / "power/runtime_status").strip()
            for device in (self._root / "sys/bus/pci/devices").glob("*")
            if _text(device / "vendor").strip() == "0x10de" and _text(device / "class").startswith("0x03")
        ]
        return bool(states) and all(state == "suspended" for state in states)

    def memory(self) -> tuple[int, int] | None:
        """Bytes of system memory, total and available; None where /proc does not say."""
        lines = dict(re.findall(r"^(\w+):\s+(\d+) kB", self._read("proc/meminfo"), re.MULTILINE))
        if "MemTotal" not in lines or "MemAvailable" not in lines:
            return None
        return int(lines["MemTotal"]) * 1024, int(lines["MemAvailable"]) * 1024

    def driver_versions(self) -> tuple[str, str] | None:
        """The loaded kernel module's version, and that of the library mapped by this process (in its file's name)."""
        module = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", self._read("proc/driver/nvidia/version"))
        library = re.search(r"libnvidia-ml\.so\.(\d+\.\d+(?:\.\d+)*)", self._read("proc/self/maps"))
        return (module.group(1), library.group(1)) if module and library else None

    def process_name(self, pid: int) -> str | None:
        """The command of a process the driver named. None in a container: the driver counts in the host's PIDs there,
        and the same number may be another process here."""
        # the initial PID namespace has this inode in every kernel (PROC_PID_INIT_INO)
        if self._link("proc/self/ns/pid") != "pid:[4026531836]":
            return None
        return self._read(f"proc/{pid}/comm").strip() or None

    def _read(self, path: str) -> str:
        return _text(self._root / path)

    def _link(self, path: str) -> str:
        try:
            return str((self._root / path).readlink())
        except OSError:
            return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
