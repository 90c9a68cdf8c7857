"""Checks of the driver: is it there, is it the right one, can NVML be used, will it survive a reboot.

Reads files only.
"""

import importlib.metadata
import os
import re

from lpxtop.doctor.node import Node
from lpxtop.doctor.results import Check, Outcome, failed, noted, passed, skipped, warned

_LIBRARY_PLACES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "usr/lib/wsl/lib",
                   "usr/local/nvidia/lib64")  # fmt: skip


def present(node: Node) -> Outcome:
    if node.pci_gpus:
        return passed(f"{len(node.pci_gpus)} NVIDIA GPU(s): {', '.join(node.pci_gpus)}", pci=node.pci_gpus)
    if node.has_gpu:
        return passed(f"{len(node.nvml.cards)} GPU(s) by NVML; none on a PCI bus that is visible here")
    advice = "if this host should have one: lspci -nn | grep 10de (in a container: was it started with --gpus all?)"
    return skipped("no NVIDIA GPU here: GPU panels stay empty, load tests work", advice)


def loaded(node: Node) -> Outcome:
    if node.driver_version is not None:
        return passed(f"kernel module {node.driver_version} is loaded", version=node.driver_version)
    if node.is_wsl:
        return passed("WSL: the driver is the Windows host's")
    if node.nvml.cards:
        return passed("NVML works, though the kernel module is not visible here (a sandboxed container)")
    if "nvidia" in node.modules:
        return passed("the kernel module is loaded; its version is not told")
    where = "on the host: " if node.in_container else ""
    return failed(
        "there is an NVIDIA GPU and no NVIDIA kernel module",
        f"{where}sudo modprobe nvidia; if that fails: sudo dmesg | grep -i nvidia, then install the driver of your "
        "distribution and reboot",
    )


def nouveau(node: Node) -> Outcome:
    others = sorted(node.modules & {"nouveau", "nova_core"})
    advice = (
        "printf 'blacklist nouveau\\noptions nouveau modeset=0\\n' | sudo tee /etc/modprobe.d/no-nouveau.conf; "
        "sudo update-initramfs -u (Debian, Ubuntu) or sudo dracut --force (RHEL); reboot"
    )
    if not others:
        return passed("nouveau is not loaded")
    text = f"{' and '.join(others)} is loaded"
    if node.driver_version is None:
        return failed(f"{text} and holds the GPU: the NVIDIA module cannot load", advice, modules=others)
    return warned(f"{text} beside the NVIDIA module", advice, modules=others)


def _built_for(node: Node, release: str) -> bool | None:
    """Whether a kernel's module tree has an nvidia module; None when the tree is not visible."""
    listing = node.read(f"lib/modules/{release}/modules.dep")
    if listing is None:
        return None
    return bool(re.search(r"(?:^|/)nvidia\.ko", listing, re.MULTILINE)) or bool(
        node.glob(f"lib/modules/{release}/updates/**/nvidia.ko*")
    )


def kernels(node: Node) -> Outcome:
    running = node.line("proc/sys/kernel/osrelease") or "?"
    built = _built_for(node, running)
    if built is None:
        return skipped(
            f"the modules of kernel {running} are not visible here" + " (container)" * node.in_container,
            "on the host: modinfo -F version nvidia; dkms status",
        )
    rebuild = "sudo apt install linux-headers-$(uname -r); sudo dkms autoinstall; dkms status"
    if not built:
        if node.driver_version is None:
            return failed(f"no nvidia module is built for the running kernel {running}", rebuild, kernel=running)
        return warned(f"loaded, but no nvidia module is installed for the running kernel {running}", rebuild)
    bare = [
        path.name
        for path in node.glob("lib/modules/*")
        if path.name != running and _built_for(node, path.name) is False and node.exists(f"boot/vmlinuz-{path.name}")
    ]
    if bare:
        return warned(
            f"kernel {bare[-1]} is installed too and has no nvidia module: booted into it, the GPUs are gone",
            f"sudo apt install linux-headers-{bare[-1]}; sudo dkms autoinstall -k {bare[-1]}",
            without_module=bare,
        )
    return passed(f"an nvidia module is built for the running kernel {running}", kernel=running)


def secure_boot(node: Node) -> Outcome:
    state = _secure_boot(node)
    if state is None:
        return skipped("Secure Boot cannot be read here", "on the host: mokutil --sb-state")
    if state and node.driver_version is None and not node.nvml.cards:
        return warned(
            "Secure Boot is on and the NVIDIA module is not loaded: perhaps it is not signed",
            "sudo dmesg | grep -i 'key was rejected'; sign the module or enrol its key: sudo mokutil --import KEY.der",
        )
    return passed(f"Secure Boot is {'on, and the module loaded' if state else 'off'}", secure_boot=state)


def _secure_boot(node: Node) -> bool | None:
    """The efivar: 4 bytes of attributes, then 0 or 1."""
    for path in node.glob("sys/firmware/efi/efivars/SecureBoot-*"):
        try:
            data = path.read_bytes()
        except OSError:
            return None
        return len(data) > 4 and data[4] == 1
    return None


def library_version(node: Node) -> str | None:
    """The version of the library that `libnvidia-ml.so.1` leads to; None when it is not in the usual places."""
    for place in _LIBRARY_PLACES:
        try:
            target = node.path(f"{place}/libnvidia-ml.so.1").readlink()
        except OSError:
            continue
        found = re.fullmatch(r"libnvidia-ml\.so\.(\d+(?:\.\d+)+)", target.name)
        if found:
            return found.group(1)
    return None


def mismatch(node: Node) -> Outcome:
    module, library = node.driver_version, library_version(node)
    advice = "reboot; or stop everything on the GPUs and: sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; " \
        "sudo modprobe nvidia"  # fmt: skip
    if "do not match" in node.nvml.text or (module and library and module != library and not node.nvml.cards):
        both = f" (module {module}, library {library})" if module and library else ""
        return failed(f"kernel module and NVML library do not match{both}: the driver was upgraded", advice,
                      module=module, library=library)  # fmt: skip
    if node.nvml.cards:
        return passed(f"kernel module and NVML library fit: {node.nvml.driver or module or 'version not told'}")
    if module and library:
        return passed(f"kernel module and NVML library are both {module}")
    return skipped("module or library version is not visible here", "cat /proc/driver/nvidia/version; nvidia-smi")


def nvml_loadable(node: Node) -> Outcome:
    answer = node.nvml
    maps = node.read("proc/self/maps") or ""
    if answer.state == "joined":
        if re.search(r"/stubs/libnvidia-ml", maps):
            return warned("NVML is CUDA's stub, not the driver's library", "take …/stubs out of LD_LIBRARY_PATH")
        return passed(f"NVML answers (driver {answer.driver or 'not told'})", driver=answer.driver)
    if "asleep" in answer.text:
        return skipped("the GPU sleeps (runtime power management); it is not woken for this", "wake it: nvidia-smi -L")
    said = node.linker_says()
    if said is not None:
        inside = "start the container with --gpus all (NVIDIA Container Toolkit)"
        advice = inside if node.in_container else "sudo ldconfig; ldconfig -p | grep nvidia-ml; install the driver"
        return failed(f"the NVML library cannot be loaded: {said}", advice)
    if answer.state == "silent":
        return failed(
            f"NVML: {answer.text}",
            "sudo dmesg | grep -iE 'xid|nvrm' | tail; ps -eo pid,stat,comm | awk '$2 ~ /D/'; a driver that hangs "
            "needs a reboot; if it is only slow: sudo nvidia-smi -pm 1",
        )
    if answer.state == "unasked":
        return skipped("NVML was not asked")
    return failed(answer.text.removeprefix("no GPU readings: ") or "NVML gives no readings", "nvidia-smi; see "
                  "driver.loaded, driver.mismatch and dev.nodes")  # fmt: skip


def nvml_package(node: Node) -> Outcome:
    del node
    versions: dict[str, str] = {}
    for name in ("nvidia-ml-py", "pynvml", "nvidia-ml-py3"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    old = versions.get("pynvml", "99").split(".")[0]
    if "nvidia-ml-py3" in versions or (old.isdecimal() and int(old) < 12):
        return warned(
            "an outdated package owns the module pynvml here: "
            + ", ".join(f"{name} {version}" for name, version in versions.items()),
            "pip uninstall -y pynvml nvidia-ml-py3; pip install --force-reinstall nvidia-ml-py",
            **versions,
        )
    if "nvidia-ml-py" not in versions:
        return warned("the package nvidia-ml-py is not installed: no GPU readings", "pip install nvidia-ml-py")
    return passed(f"nvidia-ml-py {versions['nvidia-ml-py']}", **versions)


def count(node: Node) -> Outcome:
    seen, found = len(node.pci_gpus), len(node.nvml.cards)
    evidence = {"pci": node.pci_gpus, "nvml": [card.row.get("pci") for card in node.nvml.cards]}
    if node.nvml.unreadable:
        return failed("; ".join(node.nvml.unreadable), "sudo dmesg | grep -i xid; reset or reboot the node", **evidence)
    if found >= seen:
        return passed(f"NVML opens all {found} GPU(s)", **evidence)
    missing = sorted(set(node.pci_gpus) - {card.row.get("pci") for card in node.nvml.cards})
    text = f"{seen} GPUs on the bus, {found} in NVML; missing: {', '.join(missing)}"
    if node.in_container or node.variables.get("NVIDIA_VISIBLE_DEVICES"):
        return warned(text, "meant, if this container was given only some (--gpus); else start it with --gpus all",
                      **evidence)  # fmt: skip
    return failed(text, "it fell off the bus or its driver failed: sudo dmesg | grep -iE 'xid|rminit'; reboot",
                  **evidence)  # fmt: skip


def device_nodes(node: Node) -> Outcome:
    if node.is_wsl:
        return passed("WSL: /dev/dxg") if node.exists("dev/dxg") else failed("WSL without /dev/dxg", "wsl --update")
    make = "sudo nvidia-modprobe -u -c=0"
    if not node.exists("dev/nvidiactl"):
        if node.nvml.cards:
            return passed("NVML works without /dev/nvidiactl here (a sandbox)")
        return failed("/dev/nvidiactl is missing", "start the container with --gpus all" if node.in_container else make)
    named = ["dev/nvidiactl", *(f"dev/{p.name}" for p in node.glob("dev/nvidia[0-9]*"))]
    shut = [f"/{name}" for name in named if not os.access(node.path(name), os.R_OK | os.W_OK)]
    if shut:
        return failed(f"no permission for {', '.join(shut)}", "ls -l /dev/nvidia*; sudo usermod -aG video,render $USER")
    if not node.exists("dev/nvidia-uvm"):
        return warned("/dev/nvidia-uvm is missing: NVML works, CUDA will not start", make)
    return passed(f"{len(named) - 1} GPU device node(s), readable and writable", nodes=named)


def profiling(node: Node) -> Outcome:
    parameters = node.read("proc/driver/nvidia/params") or ""
    found = re.search(r"RmProfilingAdminOnly:\s*(\d)", parameters)
    if not found:
        return skipped("/proc/driver/nvidia/params cannot be read here")
    if found.group(1) == "1" and node.uid != 0:
        return noted(
            "profiling counters (DCGM) are for root only; everything lpxtop shows works without them",
            "to open them: options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d, reboot",
        )
    return passed("profiling counters may be read")


CHECKS: tuple[Check[Node], ...] = (
    Check("gpu.present", "NVIDIA GPU", "/sys/bus/pci/devices/*/vendor, class", "skip if none", present),
    Check("driver.loaded", "Kernel module loaded", "/proc/driver/nvidia/version", "fail if absent", loaded, "gpu"),
    Check("driver.nouveau", "nouveau not loaded", "/proc/modules", "fail if it holds the GPU", nouveau, "gpu"),
    Check("driver.kernels", "Module built for the kernel", "/lib/modules/*/modules.dep",
          "fail if not for the running one, warn if not for another that is installed", kernels, "gpu"),
    Check("driver.secureboot", "Secure Boot", "/sys/firmware/efi/efivars/SecureBoot-*",
          "warn if on and the module is not loaded", secure_boot, "gpu"),
    Check("driver.mismatch", "Driver matches kernel module", "/proc/driver/nvidia/version, libnvidia-ml.so.*",
          "fail if they differ", mismatch, "gpu"),
    Check("nvml.loadable", "NVML answers", "libnvidia-ml.so.1", "fail if it does not", nvml_loadable, "gpu"),
    Check("nvml.package", "Python binding", "installed packages", "warn if an old one is there", nvml_package),
    Check("nvml.count", "All GPUs open", "PCI bus and NVML", "fail if a GPU has no handle", count, "nvml"),
    Check("dev.nodes", "Device files", "/dev/nvidia*", "fail if missing or closed", device_nodes, "gpu"),
    Check("profiling.perm", "Profiling rights", "/proc/driver/nvidia/params", "told only", profiling, "gpu"),
)  # fmt: skip
