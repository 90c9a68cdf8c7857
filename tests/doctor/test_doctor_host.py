"""Host checks against trees of files as sick hosts have them: each fault is found, and nothing else is called one."""

import os
from pathlib import Path

import pytest

from lpxtop.doctor.card import Card, NvmlAnswer
from lpxtop.doctor.examine import HOST_CHECKS, _look
from lpxtop.doctor.node import Node

MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
KERNEL = "6.8.0-41-generic"
BOX = "a" * 12 + "0" * 52
GIB = 1 << 30


class Tree:
    """A root directory made file by file."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, text: str | bytes = "") -> "Tree":
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return self

    def link(self, name: str, target: str) -> "Tree":
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
        return self

    def pci(self, address: str = "0000:3b:00.0", kind: str = "0x030200") -> "Tree":
        place = f"sys/bus/pci/devices/{address}"
        return self.write(f"{place}/vendor", "0x10de\n").write(f"{place}/class", f"{kind}\n")

    def process(
        self, pid: int, name: str, *command: str, uid: int = 1000, cgroup: str = "0::/", state: str = "S"
    ) -> "Tree":
        self.write(f"proc/{pid}/status", f"Name:\t{name}\nState:\t{state} (x)\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        self.write(f"proc/{pid}/cgroup", cgroup + "\n")
        return self.write(f"proc/{pid}/cmdline", "\0".join(command) + "\0")

    def healthy(self) -> "Tree":
        """A bare-metal GPU server in order."""
        self.pci().write("proc/driver/nvidia/version", MODULE).write("proc/modules", "nvidia_uvm 1 0\nnvidia 2 1\n")
        self.write("proc/sys/kernel/osrelease", KERNEL).write("proc/version", "Linux version 6.8.0")
        self.write(f"lib/modules/{KERNEL}/modules.dep", "updates/dkms/nvidia.ko.zst:\n")
        self.link("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "libnvidia-ml.so.550.54.15")
        for name in ("nvidiactl", "nvidia0", "nvidia-uvm"):
            self.write(f"dev/{name}")
        self.write("dev/kmsg", "6,1,1,-;usb 1-1: new device\n")
        self.write("etc/docker/daemon.json", '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}')
        self.link("dev/char/195:0", "../nvidia0")
        self.write("proc/self/limits", "Max open files            65535                65535                files\n")
        self.write("proc/driver/nvidia/params", "RmProfilingAdminOnly: 0\n")
        self.link("proc/self/ns/pid", "pid:[4026531836]")
        return self.write("proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def card(index: int = 0, **changes) -> Card:
    """A healthy H100; `changes` go to the inventory (`row_…`) or to the last sample."""
    row = {"index": index, "uuid": f"GPU-{index:08x}", "name": "H100", "pci": "0000:3b:00.0", "persistence": True,
           "compute_mode": "default", "mig": {"current": False, "pending": False},
           "ecc": {"current": True, "pending": True}, "power_limit_watts": 700.0, "power_limit_default_watts": 700.0,
           "sm_clock_max_mhz": 1980, "pcie_width_max": 16, "pcie_generation_max": 5}  # fmt: skip
    now = {"status": "ok", "power_watts": 70.0, "power_limit_watts": 700.0, "temperature_c": 35.0,
           "thermal_margin_c": 50.0, "throttle_bits": 1, "sm_clock_mhz": 345, "pcie_width": 16, "pcie_generation": 5,
           "utilization_percent": 0, "memory_used_bytes": GIB // 2, "processes": [],
           "health": {"ecc_uncorrected": 0, "remap_pending": 0, "remap_failure": 0}}  # fmt: skip
    row |= {name.removeprefix("row_"): value for name, value in changes.items() if name.startswith("row_")}
    now |= {name: value for name, value in changes.items() if not name.startswith("row_")}
    before = dict(now) | {"throttle_ns": {}}
    return Card(row, before, now, 1.0)


def node(tree: Tree, *cards: Card, nvml: NvmlAnswer | None = None, **settings) -> Node:
    answer = nvml or NvmlAnswer("joined", "", "550.54.15", "12.4", list(cards))
    return Node(root=tree.root, nvml=answer, uid=1000, **settings)


def look(node: Node, name: str):
    """One check's outcome, as the doctor makes it."""
    return _look(next(check for check in HOST_CHECKS if check.id == name), node)


# --- hosts in order ------------------------------------------------------------------------------------------------


def test_a_healthy_server_has_no_warning_but_the_baseline(tree, tmp_path):
    """On a host in order every check passes or does not apply; only the missing recording is a warning."""
    host = node(tree.healthy(), card(), recordings=tmp_path / "none")

    found = {check.id: _look(check, host) for check in HOST_CHECKS}

    bad = {name: outcome.text for name, outcome in found.items() if outcome.status in ("warn", "fail")}
    assert list(bad) == ["launch.baseline"]
    assert not any("itself failed" in outcome.text for outcome in found.values())
    assert found["driver.mismatch"].text == "kernel module and NVML library fit: 550.54.15"
    assert found["driver.kernels"].evidence == {"kernel": KERNEL}


def test_an_empty_host_fails_nothing(tree):
    """Where nothing can be read nothing is called a fault."""
    found = [_look(check, node(tree, nvml=NvmlAnswer("unavailable", "no GPU readings"))) for check in HOST_CHECKS]

    assert "fail" not in {outcome.status for outcome in found}
    assert not any("itself failed" in outcome.text for outcome in found)


def test_every_id_is_unique_and_has_its_row():
    """Ids are stable names: each once, with a title, a source and a rule."""
    ids = [check.id for check in HOST_CHECKS]

    assert len(ids) == len(set(ids))
    assert all(check.title and check.source and check.rule for check in HOST_CHECKS)


# --- the driver ----------------------------------------------------------------------------------------------------


def test_a_gpu_without_its_module(tree):
    """A card on the bus and no module: fail, and nouveau is named as the one that holds it."""
    host = node(tree.pci().write("proc/modules", "nouveau 1 0 - Live\n"), nvml=NvmlAnswer("unavailable", "x"))

    assert look(host, "driver.loaded").status == "fail"
    assert "modprobe nvidia" in look(host, "driver.loaded").advice
    assert look(host, "driver.nouveau").status == "fail"
    assert look(host, "driver.nouveau").evidence == {"modules": ["nouveau"]}


def test_a_module_for_another_kernel_only(tree):
    """The running kernel has no nvidia module: fail with the way to build it."""
    tree.pci().write("proc/sys/kernel/osrelease", KERNEL).write(
        f"lib/modules/{KERNEL}/modules.dep", "kernel/fs/ext4.ko:\n"
    )

    found = look(node(tree, nvml=NvmlAnswer("unavailable", "x")), "driver.kernels")

    assert (found.status, found.evidence) == ("fail", {"kernel": KERNEL})
    assert "dkms autoinstall" in found.advice


def test_the_next_boot_would_lose_the_gpus(tree):
    """A newer kernel is installed without an nvidia module: warned of before the reboot, not after."""
    tree.healthy().write("lib/modules/6.8.0-45-generic/modules.dep", "kernel/fs/ext4.ko:\n").write(
        "boot/vmlinuz-6.8.0-45-generic"
    )

    found = look(node(tree, card()), "driver.kernels")

    assert (found.status, found.evidence) == ("warn", {"without_module": ["6.8.0-45-generic"]})


def test_secure_boot_refuses_the_module(tree):
    """The efivar's fifth byte is 1 and no module is loaded: a hint at signing; 0 is no finding."""
    tree.pci().write("sys/firmware/efi/efivars/SecureBoot-8be4", b"\x06\0\0\0\x01")
    host = node(tree, nvml=NvmlAnswer("unavailable", "x"))
    assert look(host, "driver.secureboot").status == "warn"

    tree.write("sys/firmware/efi/efivars/SecureBoot-8be4", b"\x06\0\0\0\0")
    assert look(host, "driver.secureboot").text == "Secure Boot is off"


def test_driver_upgraded_without_reboot(tree):
    """Module 550.54.15, library 550.90.07, NVML refuses: fail, both versions told."""
    tree.pci().write("proc/driver/nvidia/version", MODULE)
    tree.link("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "libnvidia-ml.so.550.90.07")
    host = node(tree, nvml=NvmlAnswer("unavailable", "kernel module and library do not match"))

    found = look(host, "driver.mismatch")

    assert (found.status, found.evidence) == ("fail", {"module": "550.54.15", "library": "550.90.07"})
    assert "reboot" in found.advice


@pytest.mark.parametrize(
    ("answer", "linker", "status", "word"),
    [
        (NvmlAnswer("unavailable", "no GPU readings: x"), "libnvidia-ml.so.1: cannot open shared object file", "fail",
         "cannot open shared object file"),
        (NvmlAnswer("silent", "the driver did not answer within 8 s"), None, "fail", "did not answer"),
        (NvmlAnswer("unavailable", "the GPU is asleep (runtime power management)"), None, "skip", "sleeps"),
        (NvmlAnswer("unavailable", "no GPU readings: no permission to open"), None, "fail", "no permission to open"),
    ],
)  # fmt: skip
def test_nvml_that_does_not_answer(tree, answer, linker, status, word):
    """A missing library, a hang, no permission: fails with the true reason; a GPU asleep is left asleep."""
    found = look(node(tree.pci(), nvml=answer, linker_says=lambda: linker), "nvml.loadable")

    assert found.status == status
    assert word in found.text


def test_a_gpu_off_the_bus(tree):
    """Two cards on the bus, one in NVML: the missing one is named; in a container it may be meant."""
    tree.healthy().pci("0000:86:00.0")
    found = look(node(tree, card()), "nvml.count")
    assert found.status == "fail"
    assert "missing: 0000:86:00.0" in found.text

    tree.write(".dockerenv")
    assert look(node(tree, card()), "nvml.count").status == "warn"


def test_device_files(tree):
    """No nvidiactl: fail; no uvm: CUDA will not start, warn; a closed node: fail."""
    host = node(tree.pci(), nvml=NvmlAnswer("unavailable", "x"))
    assert look(host, "dev.nodes").text == "/dev/nvidiactl is missing"
    tree.write("dev/nvidiactl").write("dev/nvidia0")
    assert look(host, "dev.nodes").status == "warn"
    tree.write("dev/nvidia-uvm")
    assert look(host, "dev.nodes").status == "pass"
    if os.getuid() != 0:
        (tree.root / "dev/nvidia0").chmod(0)
        assert look(host, "dev.nodes").text == "no permission for /dev/nvidia0"


# --- the GPUs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "changes", "status", "words"),
    [
        ("gpu.persistence", {"row_persistence": False}, "warn", "persistence mode is off"),
        ("gpu.computemode", {"row_compute_mode": "prohibited"}, "fail", "PROHIBITED"),
        ("gpu.computemode", {"row_compute_mode": "exclusive_process", "processes": [{"pid": 7}]}, "warn", "EXCLUSIVE"),
        ("gpu.mig", {"row_mig": {"current": False, "pending": True}}, "warn", "becomes on"),
        ("gpu.power.limit", {"row_power_limit_watts": 350.0}, "warn", "350 W, 50% of the default 700 W"),
        ("gpu.power.now", {"power_watts": 690.0, "throttle_bits": 4}, "warn", "690 of 700 W"),
        ("gpu.power.now", {"power_watts": 690.0, "throttle_bits": 0}, "pass", "690 of 700 W"),
        ("gpu.thermal", {"temperature_c": 88.0, "thermal_margin_c": 2.0}, "warn", "88 °C, 2 °C below"),
        ("gpu.thermal", {"throttle_bits": 0x48}, "fail", "too hot"),
        ("gpu.throttle", {"throttle_bits": 0x4}, "warn", "power wall"),
        ("gpu.throttle", {"throttle_bits": 0x80}, "fail", "power brake"),
        ("gpu.throttle", {"throttle_bits": 0x8}, "fail", "hardware slowdown"),
        ("gpu.throttle", {"throttle_bits": 0x1 | 0x2 | 0x100}, "pass", "not throttled"),
        ("gpu.clocks.locked", {"utilization_percent": 95, "sm_clock_mhz": 1005, "throttle_bits": 0}, "warn", "locked"),
        ("gpu.clocks.locked", {"utilization_percent": 95, "sm_clock_mhz": 1005, "throttle_bits": 4}, "pass", "1005"),
        ("gpu.pcie", {"pcie_width": 8}, "warn", "gen 5 x8 (gen 5 x16)"),
        ("gpu.pcie", {"pcie_generation": 1}, "pass", "gen 1"),
        ("gpu.pcie", {"pcie_generation": 1, "utilization_percent": 90}, "warn", "slower link"),
        ("gpu.ecc", {"health": {"ecc_uncorrected": 3}}, "fail", "3 uncorrected"),
        ("gpu.remap", {"health": {"remap_failure": 1}}, "fail", "worn out"),
        ("gpu.remap", {"health": {"remap_pending": 1}}, "warn", "wait to be remapped"),
        ("gpu.recovery", {"health": {"recovery_action": "reset"}}, "fail", "reset"),
        ("gpu.processes", {"memory_used_bytes": 40 * GIB}, "warn", "40.0G in use and no process"),
        ("gpu.unified", {"row_unified_memory": True}, "pass", "shared with the system"),
    ],
)
def test_a_sick_gpu(tree, check, changes, status, words):
    """The second of two GPUs has the fault: found, named with its index, and the healthy one is not blamed."""
    found = look(node(tree.healthy(), card(0), card(1, **changes)), check)

    assert found.status == status
    assert words in found.text
    if status != "pass":
        assert found.text.startswith("GPU 1: ")
        assert "GPU 0" not in found.text
        assert found.advice


def test_dips_that_no_mask_shows(tree):
    """A quarter second of thermal nanoseconds in one second is throttling, though the mask is clean now."""
    hot = card(0)
    hot.before["throttle_ns"], hot.now["throttle_ns"] = {"thermal": 5_000_000_000}, {"thermal": 5_250_000_000}

    found = look(node(tree.healthy(), hot), "gpu.throttle")

    assert (found.status, found.evidence["GPU 0"]["grown"]) == ("warn", ["thermal wall"])


@pytest.mark.parametrize(
    ("log", "status", "xids"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n", "fail", {"79": 1}),
        ("NVRM: Xid (PCI:0000:3b:00): 94, pid=1, x\nNVRM: Xid (PCI:0000:3b:00): 94, pid=2, x\n", "warn", {"94": 2}),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=4411, name=python3, MMU Fault\n", "pass", {"31": 1}),
    ],
)
def test_xids_in_the_kernel_log(tree, log, status, xids):
    """Fatal numbers fail, serious ones warn, what programs cause is only told."""
    found = look(node(tree.healthy().write("dev/kmsg", log), card()), "gpu.xid")

    assert (found.status, found.evidence) == (status, {"xids": xids})


def test_a_kernel_log_that_must_not_be_read(tree):
    """Without the log: SKIP, and the command for root."""
    tree.healthy()
    (tree.root / "dev/kmsg").unlink()

    found = look(node(tree, card()), "gpu.xid")

    assert (found.status, found.advice) == ("skip", "sudo dmesg -T | grep -i xid")


def test_a_holder_that_is_stuck(tree):
    """A process in state D that holds memory is named with its state."""
    tree.healthy().process(77, "python3", "python3", "serve.py", state="D")

    found = look(node(tree, card(processes=[{"pid": 77}])), "gpu.processes")

    assert found.status == "warn"
    assert "python3 (77, state D)" in found.text


@pytest.mark.parametrize(
    ("visible", "order", "status"),
    [("0", None, "pass"), ("5", None, "warn"), ("", None, "warn"), ("GPU-00000001", None, "pass"),
     ("GPU-ffff", None, "warn"), (None, None, "pass")],
)  # fmt: skip
def test_cuda_visible_devices(tree, visible, order, status):
    """Entries that name no GPU are found, by number and by UUID."""
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    assert look(node(tree.healthy(), card(0), card(1), variables=variables), "gpu.visible").status == status


def test_mixed_models_and_numbers(tree):
    """Numbers mean another order to CUDA where models differ, unless the order is fixed."""
    cards = (card(0), card(1, row_name="T4"))
    tree.healthy()
    assert look(node(tree, *cards, variables={"CUDA_VISIBLE_DEVICES": "1"}), "gpu.visible").status == "warn"
    fixed = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert look(node(tree, *cards, variables=fixed), "gpu.visible").status == "pass"


def test_nvswitches_without_their_manager(tree):
    """Switches on the bus and no fabric manager: fail; with it: pass (its name is cut to 15 characters)."""
    tree.healthy().pci("0000:05:00.0", "0x068000")
    assert look(node(tree, card()), "gpu.fabric").status == "fail"
    tree.process(50, "nv-fabricmanage", "/usr/bin/nv-fabricmanager")
    assert look(node(tree, card()), "gpu.fabric").status == "pass"


# --- containers ----------------------------------------------------------------------------------------------------


def test_docker_without_the_toolkit(tree):
    """Docker and a GPU and nothing between: warn with the three commands; broken JSON: fail; a CDI file: pass."""
    tree.pci().write("usr/bin/dockerd")
    assert "nvidia-ctk runtime configure" in look(node(tree, card()), "ctr.runtime").advice
    tree.write("etc/docker/daemon.json", "{")
    assert look(node(tree, card()), "ctr.runtime").status == "fail"
    tree.write("etc/docker/daemon.json", "{}").write("etc/cdi/nvidia.yaml")
    assert look(node(tree, card()), "ctr.runtime").status == "pass"


def test_daemon_reload_would_take_the_gpus(tree):
    """systemd's cgroup driver without /dev/char links is warned of; cgroupfs is not."""
    tree.pci().write("etc/docker/daemon.json", "{}")
    assert look(node(tree, card()), "ctr.cgroup").status == "warn"
    tree.write("etc/docker/daemon.json", '{"exec-opts": ["native.cgroupdriver=cgroupfs"]}')
    assert look(node(tree, card()), "ctr.cgroup").status == "pass"


def test_an_engine_whose_container_has_no_gpu(tree):
    """vLLM in a container: on NVML's list it passes; with a /dev without GPUs it fails with its container's id."""
    tree.healthy().process(
        900, "vllm", "python3", "-m", "vllm.entrypoints.openai.api_server", cgroup=f"0::/docker/{BOX}"
    )
    found = look(node(tree, card(processes=[{"pid": 900}])), "ctr.gpu_visible")
    assert (found.status, found.evidence) == ("pass", {"container": "a" * 12})

    tree.write("proc/900/root/dev/null")
    found = look(node(tree, card()), "ctr.gpu_visible")
    assert found.status == "fail"
    assert found.text.startswith("vllm (pid 900, container aaaaaaaaaaaa) has no GPU inside")

    tree.write("proc/900/root/dev/nvidia0")
    assert look(node(tree, card()), "ctr.gpu_visible").status == "pass"


@pytest.mark.parametrize(
    ("library", "driver", "status", "word"),
    [("libcudart.so.13", "12.4", "fail", "driver 580 or newer"), ("libcudart.so.12", "12.4", "pass", ""),
     ("libcudart.so.12.8.90", "12.4", "warn", "a newer driver of the same branch"),
     ("libcudart.so.11.0", "12.4", "pass", "")],
)  # fmt: skip
def test_cuda_of_the_engine_and_of_the_driver(tree, library, driver, status, word):
    """A newer major fails and names the driver it needs; a newer minor of the same major is a warning."""
    tree.healthy().process(900, "vllm", "vllm", "serve", "m").write("proc/900/maps", f"7f00 r-xp 0 0 0 /x/{library}\n")
    host = node(tree, nvml=NvmlAnswer("joined", "", "550.54.15", driver, [card()]))

    found = look(host, "cuda.compat")

    assert found.status == status
    assert word in found.advice


# --- the system ----------------------------------------------------------------------------------------------------


def test_shared_memory_of_a_container(tree):
    """64 MiB with two GPUs in a container is warned of; with one GPU, or on the host, it is not."""
    tree.healthy().write("proc/self/mounts", "shm /dev/shm tmpfs rw,nosuid,size=65536k 0 0\n")
    assert look(node(tree, card(), card(1)), "sys.shm").status == "pass"
    tree.write(".dockerenv")
    found = look(node(tree, card(), card(1)), "sys.shm")
    assert (found.status, found.evidence) == ("warn", {"bytes": 64 << 20})
    assert look(node(tree, card()), "sys.shm").status == "pass"


@pytest.mark.parametrize(
    ("limit", "concurrency", "status"),
    [("256", 200, "fail"), ("1024", 8, "warn"), ("65535", 8, "pass"), ("unlimited", 8, "pass")],
)
def test_open_files(tree, limit, concurrency, status):
    """Below concurrency + 64 it cannot work, below 4096 it may not."""
    tree.write("proc/self/limits", f"Max open files            {limit}                 65535                files\n")

    assert look(node(tree, concurrency=concurrency), "sys.nofile").status == status


def test_memory_cpu_and_ports(tree):
    """Pressure stalls, throttled CPU periods and few ports are found with their figures."""
    tree.write("proc/pressure/memory", "some avg10=9.0\nfull avg10=3.50 avg60=1\n").write(
        "proc/meminfo", "MemTotal: 100 kB\nMemAvailable: 50 kB\n"
    )
    tree.write("sys/fs/cgroup/cpu.stat", "nr_periods 100\nnr_throttled 40\n")
    tree.write("proc/sys/net/ipv4/ip_local_port_range", "60000 60099\n")
    host = node(tree, concurrency=64)

    assert look(host, "sys.memory").evidence["full_avg10"] == 3.5
    assert look(host, "sys.memory").status == "warn"
    assert look(host, "sys.cpu").evidence["cgroup_throttled"] == 0.4
    assert look(host, "sys.cpu").status == "warn"
    assert look(host, "sys.ports").text == "100 local ports for 64 connections"


KEY = "sk-live-0123456789abcdefghij"


@pytest.mark.parametrize(
    ("command", "key", "status"),
    [
        (("vllm", "serve", "m", "--api-key", KEY), KEY, "fail"),
        (("vllm", "serve", "m", "--api-key", "other-secret"), None, "warn"),
        (("curl", "-H", f"Authorization: Bearer {KEY}"), None, "warn"),
        (("vllm", "serve", "m", "--api-key", "$VLLM_API_KEY"), None, "pass"),
        (("vllm", "serve", "--api-key", "--port", "1"), None, "pass"),
        (("lpxtop", "run", "--api-key-env", "MY_KEY"), None, "pass"),
        (("python", "x.py", "--max-token", "128"), None, "pass"),
    ],
)
def test_keys_on_command_lines(tree, command, key, status):
    """A key on a command line is found and never repeated in the report."""
    tree.process(31, "srv", *command)

    found = look(node(tree, key=key), "launch.keys")

    assert found.status == status
    assert KEY not in repr(found)
    assert "other-secret" not in repr(found)


def test_the_key_in_another_users_environment(tree):
    """Another user's process that has this endpoint's key fails; one's own does not."""
    tree.process(31, "cron", "cron", uid=33).write("proc/31/environ", f"A=b\0LPXTOP_API_KEY={KEY}\0")
    found = look(node(tree, key=KEY), "launch.keys")
    assert (found.status, found.evidence) == ("fail", {"pids": [31]})

    tree.process(31, "cron", "cron", uid=1000)
    assert look(node(tree, key=KEY), "launch.keys").status == "pass"


def test_a_baseline_of_this_endpoint(tree, tmp_path):
    """Only a real recording of the same endpoint is a baseline; a simulated one is none."""
    from lpxtop.events import codec
    from lpxtop.events.records import SCHEMA, Header

    def record(name: str, url: str, simulated: bool) -> None:
        header = Header(
            t=0, schema=SCHEMA, session="s", wall_ns=1, mono_ns=1, lpxtop="0", target={"url": url}, simulated=simulated
        )
        (tmp_path / "rec").mkdir(exist_ok=True)
        (tmp_path / "rec" / name).write_bytes(codec.encode(header))

    here, there = "http://a:1/v1", "http://b:1/v1"
    record("sim.jsonl", here, True)
    record("other.jsonl", there, False)
    host = node(tree, recordings=tmp_path / "rec", url=here)
    assert look(host, "launch.baseline").status == "warn"

    record("mine.jsonl", here, False)
    found = look(host, "launch.baseline")
    assert found.status == "pass"
    assert found.text.startswith("1 recording(s) of this endpoint")


def test_platforms(tree):
    """WSL and a Jetson are recognised and told what will be missing."""
    tree.write("proc/version", "Linux version 5.15.90.1-microsoft-standard-WSL2").write("etc/nv_tegra_release")
    tree.write("proc/device-tree/model", b"NVIDIA Jetson AGX Orin\0")

    assert look(node(tree), "plat.wsl").text.startswith("WSL:")
    assert look(node(tree), "plat.jetson").text == "NVIDIA Jetson AGX Orin: NVML answers little here"
