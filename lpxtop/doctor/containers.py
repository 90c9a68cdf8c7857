"""Checks of containers: the runtime knows GPUs, the engine inside sees them, its CUDA fits the driver.

Reads files only, and asks no container daemon: its socket is root by another name.
"""

import re

import msgspec

from lpxtop.doctor.node import Node, Process
from lpxtop.doctor.results import Check, Outcome, failed, noted, passed, skipped, warned, worst

LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The first driver branch of each CUDA major (NVIDIA's CUDA compatibility guide)."""
_TOOLKIT = "install nvidia-container-toolkit; sudo nvidia-ctk runtime configure --runtime=docker; sudo systemctl " \
    "restart docker"  # fmt: skip


def inside(node: Node) -> Outcome:
    if not node.in_container:
        return passed("not in a container")
    return noted("inside a container", "the host's processes and some checks are not visible; run it on the host too")


def _docker_config(node: Node) -> dict[str, object] | None:
    """Docker's settings; None when there is no readable JSON."""
    text = node.read("etc/docker/daemon.json")
    try:
        found = msgspec.json.decode(text) if text else None
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) else None


def runtime(node: Node) -> Outcome:
    has_docker = any(node.exists(p) for p in ("usr/bin/docker", "usr/bin/dockerd", "etc/docker", "run/docker.sock"))
    has_other = any(node.exists(p) for p in ("run/containerd/containerd.sock", "usr/bin/podman", "usr/bin/crio"))
    if node.in_container:
        return skipped("inside a container: the runtime is the host's", "on the host: docker info | grep -i runtimes")
    if not has_docker and not has_other:
        return skipped("no container runtime here")
    if has_docker and node.read("etc/docker/daemon.json") and _docker_config(node) is None:
        return failed("/etc/docker/daemon.json is not JSON: docker will not start again", "python3 -m json.tool "
                      "/etc/docker/daemon.json")  # fmt: skip
    runtimes = (_docker_config(node) or {}).get("runtimes")
    specs = node.glob("etc/cdi/*nvidia*") + node.glob("var/run/cdi/*nvidia*") + node.glob("run/cdi/*nvidia*")
    if (isinstance(runtimes, dict) and "nvidia" in runtimes) or specs:
        how = "runtime nvidia" if isinstance(runtimes, dict) and "nvidia" in runtimes else f"CDI ({specs[0].name})"
        return passed(f"containers can get GPUs: {how}")
    toolkit = any(node.exists(p) for p in ("usr/bin/nvidia-container-cli", "usr/bin/nvidia-ctk"))
    if toolkit and has_docker:
        return passed("nvidia-container-toolkit is installed: docker run --gpus works through its hook")
    return warned("a container runtime and a GPU, and nothing that brings them together", _TOOLKIT)


def cgroup(node: Node) -> Outcome:
    if node.in_container or not node.exists("etc/docker"):
        return skipped("no docker here" if not node.in_container else "inside a container: docker is the host's")
    options = (_docker_config(node) or {}).get("exec-opts")
    cgroupfs = isinstance(options, list) and any("cgroupfs" in str(option) for option in options)
    linked = any("nvidia" in str(path.readlink()) for path in node.glob("dev/char/195:*") if path.is_symlink())
    if cgroupfs or linked:
        return passed("GPUs survive a daemon-reload: " + ("cgroupfs driver" if cgroupfs else "/dev/char links exist"))
    return warned(
        "systemctl daemon-reload may take the GPUs away from running containers (no /dev/char links)",
        "sudo nvidia-ctk system create-dev-char-symlinks --create-all; symptom: NVML 'unknown error' in the container",
    )


def gpu_visible(node: Node) -> Outcome:
    """Engines in containers: does the process itself see a GPU? By NVML's list, else by its own /dev."""
    boxed = [engine for engine in node.engines if engine.container]
    if not boxed:
        return skipped("no inference server in a container is visible here", "docker exec CONTAINER nvidia-smi -L")
    return worst([_sees_gpu(node, engine) for engine in boxed[:8]])


def _sees_gpu(node: Node, engine: Process) -> Outcome:
    who = f"{engine.engine} (pid {engine.pid}, container {engine.container})"
    box = engine.container
    tree = {process.pid for process in node.processes if process.container == box}
    held = {p["pid"] for card in node.nvml.cards for p in card.processes or ()} if node.hosts_pid_namespace else set()
    if tree & held:
        return passed(f"{who} holds memory on a GPU", container=box)
    devices = node.glob(f"proc/{engine.pid}/root/dev/nvidia[0-9]*")
    if devices:
        return passed(f"{who} has {len(devices)} GPU device(s)", container=box)
    if node.exists(f"proc/{engine.pid}/root/dev"):
        return failed(f"{who} has no GPU inside its container: it runs on the CPU or not at all",
                      f"start it with --gpus all; docker exec {box} nvidia-smi -L", container=box)  # fmt: skip
    return skipped(f"{who}: its devices are visible to root only", f"sudo docker exec {box} nvidia-smi -L")


def cuda(node: Node) -> Outcome:
    driver = node.nvml.cuda_driver
    wanted = _engine_cuda(node)
    if driver is None:
        return skipped("NVML does not tell the driver's CUDA version")
    if not wanted:
        return skipped(f"driver: CUDA {driver}; no engine whose CUDA can be read is running here",
                       "in its container: python3 -c 'import torch; print(torch.version.cuda)'")  # fmt: skip
    return worst([_fits(who, version, driver) for who, version in wanted.items()])


def _engine_cuda(node: Node) -> dict[str, str]:
    """CUDA versions by who needs them: the image's CUDA_VERSION, and the runtime library that engines have mapped."""
    found: dict[str, str] = {}
    image = node.variables.get("CUDA_VERSION", "")
    if re.match(r"\d+\.\d+", image):
        found["this container's image"] = ".".join(image.split(".")[:2])
    for engine in node.engines:
        version = re.search(r"libcudart\.so\.(\d+(?:\.\d+)?)", node.read(f"proc/{engine.pid}/maps") or "")
        if version:
            found[f"{engine.engine} (pid {engine.pid})"] = version.group(1)
    return found


def _fits(who: str, version: str, driver: str) -> Outcome:
    """Majors decide; within one, a newer minor runs but cannot compile PTX (minor-version compatibility)."""
    wanted, has = [tuple(int(part) for part in text.split(".")) for text in (version, driver)]
    if wanted[0] > has[0]:
        least = LEAST_DRIVER.get(wanted[0])
        return failed(
            f"{who} needs CUDA {version}, the driver offers {driver}",
            (f"driver {least} or newer" if least else "a newer driver") + ", or an image built for the older CUDA",
            engine=version,
            driver=driver,
        )
    if wanted[0] == has[0] and len(wanted) > 1 and wanted > has:
        return warned(f"{who} has CUDA {version}, the driver {driver}: runs, but kernels that compile at start may not",
                      "a newer driver of the same branch, or an image of the older CUDA", engine=version,
                      driver=driver)  # fmt: skip
    return passed(f"{who}: CUDA {version}, the driver offers {driver}", engine=version, driver=driver)


CHECKS: tuple[Check[Node], ...] = (
    Check("ctr.inside", "Container", "/.dockerenv, /proc/1/cgroup", "told only", inside),
    Check("ctr.runtime", "Runtime configured for GPUs", "/etc/docker/daemon.json, CDI", "warn if not", runtime, "gpu"),
    Check("ctr.cgroup", "GPUs survive daemon-reload", "/dev/char, daemon.json", "warn if not", cgroup, "gpu"),
    Check("ctr.gpu_visible", "GPU visible in the container", "/proc/PID/cgroup, NVML", "fail if an engine has none",
          gpu_visible, "gpu"),
    Check("cuda.compat", "CUDA of engine and driver", "NVML, /proc/PID/maps, CUDA_VERSION",
          "fail if the major is newer than the driver's", cuda, "nvml"),
)  # fmt: skip
