"""The GPU probe against a scripted driver: what it says and does when things break. It never crashes, never says 0 for
unknown, and never makes anybody wait."""

import itertools

import pytest

from lpxtop.errors import UsageError
from lpxtop.probes.gpu import GpuSource

CALLS = "clock calls 250\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("init 9\n", "the kernel driver is not loaded: load it (modprobe nvidia) or reboot"),
        ("init 4\n", "no permission to open the GPUs: check the rights of /dev/nvidia* and the container's device "
                     "rules"),
        ("init 17\n", "the system blocks the GPUs (cgroup or device policy): allow /dev/nvidia* for this container"),
        ("init 999\n", "NVML says 'unknown error'; in a container, restart it: access to the devices is lost after a "
                       "daemon-reload on the host"),
        ("init 20\n", "NVML does not start: out of memory"),
        ("gpus 0\n", "NVML works but shows no GPU (a container started without --gpus?)"),
        ("gpus 2\nerr * nvmlDeviceGetHandleByIndex_v2 code=4\n", "none of 2 GPUs can be opened: no permission"),
    ],
)  # fmt: skip
def test_no_readings_at_all(scenario, text, sentence):
    """One event: unavailable, one sentence with what to do; then the end."""
    out = scenario(text)
    assert [source.state for source in out.sources] == ["unavailable"]
    assert out.sources[0].text == f"no GPU readings: {sentence}"
    assert (len(out.events), out.code, out.stderr) == (1, 0, "")


def test_no_library(scenario):
    """A host without NVML."""
    out = scenario("", library=False)
    assert len(out.events) == 1
    assert out.sources[0].text.startswith("no GPU readings: no NVIDIA driver here (libnvidia-ml.so.1)")


def test_versions_that_do_not_match(scenario):
    """After a driver upgrade without a reboot both versions are named."""
    out = scenario(
        "init 18\n",
        files={
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\nGCC: 12",
            "proc/self/maps": "7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.570.86.15\n",
        },
    )  # fmt: skip
    assert out.sources[0].text == (
        "no GPU readings: kernel module 550.54.15 and library 570.86.15 do not match (driver upgraded?): "
        "reboot, or reload the nvidia modules"
    )  # fmt: skip


def test_a_sleeping_laptop_gpu_is_not_woken(scenario):
    """All GPUs suspended: nothing is called; naming one wakes it."""
    files = {
        f"sys/bus/pci/devices/0000:01:00.0/{name}": text
        for name, text in {"vendor": "0x10de\n", "class": "0x030000\n", "power/runtime_status": "suspended\n"}.items()
    }
    out = scenario("gpus 1\n", files=files)
    assert (out.calls, out.sources[0].state) == ([], "unavailable")
    assert "asleep" in out.sources[0].text
    assert scenario("gpus 1\n", files=files, select="nvml:0", samples=1).samples[0].status == ["ok"]


def test_wsl_crash_kills_only_a_child(scenario):
    """NVML that crashes under WSL: a sentence, and the tool lives."""
    files = {"proc/version": "Linux version 5.15.167.4-microsoft-standard-WSL2"}
    out = scenario("crash nvmlInitWithFlags\n", files=files)
    assert (out.code, out.sources[0].state) == (0, "unavailable")
    assert out.sources[0].text == "no GPU readings: NVML crashes under WSL; update the Windows driver"
    assert scenario("gpus 1\n" + CALLS, files=files, samples=1).samples[0].status == ["ok"]


def test_lost(scenario):
    """GPU 1 falls off the bus at 1 s: it is lost, its handle is not used again, GPU 0 goes on, one event says so."""
    out = scenario("gpus 2\n" + CALLS + "gpu 0 util=50\nerr 1 * code=15 at=1000\n", samples=10)
    states = [sample.status for sample in out.samples]
    assert states[0] == ["ok", "ok"]
    assert states[-1] == ["ok", "lost"]
    assert sum(a != b for a, b in itertools.pairwise(states)) == 1
    assert (out.samples[-1].utilization_percent, out.samples[-1].power_watts) == ([50, None], [70.0, None])
    assert out.samples[-1].notes["status"] == "GPU 1: it fell off the bus"
    assert [s.text for s in out.sources if s.state == "failed"] == [
        "GPU 1 is lost: it fell off the bus; dmesg names the XID"
    ]
    refused = [call for call in out.calls if call[1] == 1 and call[3] == 15]
    assert len(refused) == 1
    assert [call for call in out.calls if call[1] == 1 and call[2] > refused[0][2]] == []


def test_lost_and_back(scenario):
    """A lost GPU is looked for by its UUID; after a reset it is sampled again, and that is said."""
    out = scenario("gpus 2\nerr 1 * code=15 at=250 until=500\n", samples=80, constants={"REOPEN_S": 0.1})
    states = [sample.status[1] for sample in out.samples]
    assert [state for state, _ in itertools.groupby(states)] == ["ok", "lost", "ok"]
    assert [(s.state, s.text) for s in out.sources[1:]] == [
        ("failed", "GPU 1 is lost: it fell off the bus; dmesg names the XID"), ("joined", "GPU 1 is back"),
    ]  # fmt: skip
    assert {call[0] for call in out.calls if call[1] == 1 and call[3] == 15} <= {
        "nvmlDeviceGetFieldValues", "nvmlDeviceGetHandleByUUID",
    } | {call[0] for call in out.calls if call[1] == 1 and call[2] < 280}  # fmt: skip


def test_reset_required(scenario):
    """Code 16 counts as lost, with its own words."""
    out = scenario("gpus 1\n" + CALLS + "err 0 * code=16 at=600\n", samples=6)
    assert out.samples[-1].status == ["lost"]
    assert out.samples[-1].notes["status"] == "it must be reset"
    assert out.samples[-1].utilization_percent == []


def test_one_gpu_cannot_be_opened(scenario):
    """The count has it, the handle does not come: it is listed with the reason, the other one is read."""
    out = scenario("gpus 2\n" + CALLS + "gpu 0 util=30\nerr 1 nvmlDeviceGetHandleByIndex_v2 code=4\n")
    assert out.gpus[1] == {"index": 1, "error": "no permission"}
    assert out.samples[-1].status == ["ok", "error"]
    assert out.samples[-1].utilization_percent == [30, None]
    assert out.samples[-1].notes["status"] == "GPU 1: no permission"


def test_no_permission_for_one_reading(scenario):
    """The reading is missing and says why; the others go on."""
    out = scenario("gpus 1\n" + CALLS + "err 0 nvmlDeviceGetUtilizationRates code=4\n", samples=4, hz=100)
    last = out.samples[-1]
    assert (last.status, last.utilization_percent, last.power_watts) == (["ok"], [], [70.0])
    assert last.notes["utilization_percent"] == "no permission"
    assert len(out.called("nvmlDeviceGetUtilizationRates")) == 1


def test_everything_unknown_in_a_container(scenario):
    """From 200 ms on every call answers 999, as after a daemon-reload: said once, with advice; asked ever more seldom;
    and when it passes that is seen."""
    out = scenario("gpus 2\nerr * * code=999 at=200 until=450\n", samples=100, hz=100)
    states = [state for state, _ in itertools.groupby(tuple(sample.status) for sample in out.samples)]
    assert states[0] == states[-1] == ("ok", "ok")
    assert ("error", "error") in states
    told = [(s.state, s.text) for s in out.sources[1:]]
    assert told == [
        ("failed", "every GPU answers 'unknown error'; in a container, restart it: access to the devices is lost "
                   "after a daemon-reload on the host"),
        ("joined", "the GPUs answer again"),
    ]  # fmt: skip
    bad = next(sample for sample in out.samples if sample.status == ["error", "error"])
    assert bad.utilization_percent == []
    assert bad.notes["utilization_percent"] == "unknown error"
    assert len([call for call in out.called("nvmlDeviceGetUtilizationRates", 0) if call[3] == 999]) <= 8


def test_a_time_out_now_and_then(scenario):
    """A transient error costs that reading of that sample, not more."""
    out = scenario("gpus 1\n" + CALLS + "err 0 nvmlDeviceGetClockInfo code=10 after=4 once\n", samples=8)
    missing = [sample for sample in out.samples if "sm_clock_mhz" in sample.notes or "memory_clock_mhz" in sample.notes]
    assert len(missing) == 1
    assert "timed out" in missing[0].notes.values()
    assert out.samples[-1].sm_clock_mhz == [345]


def test_hang_of_one_gpu(scenario):
    """A call of GPU 1 hangs: it is stale with its age, GPU 0 goes on, leaving takes no time."""
    out = scenario(
        "gpus 2\nhang nvmlDeviceGetUtilizationRates gpu=1 at=100 for=30000\n",
        samples=40, hz=50, constants={"HANG_S": 0.3},
    )  # fmt: skip
    states = [tuple(sample.status) for sample in out.samples]
    assert states[0] == ("ok", "ok")
    assert states[-1] == ("ok", "stale")
    assert out.samples[-1].utilization_percent == [0, None]
    assert out.samples[-1].notes["status"].startswith("GPU 1: the driver has not answered for ")
    assert [s.text for s in out.sources if s.state == "failed"] == [
        "GPU 1: the driver does not answer; its figures are stale"
    ]
    after = [call for call in out.calls if call[1] == 1 and call[3] == -1]
    assert len(after) == 1
    assert (out.code, out.stderr) == (0, "")
    assert out.leaving_s < 1.0


def test_hang_that_passes(scenario):
    """The call returns after a second: the GPU is read again."""
    out = scenario(
        "gpus 1\nhang nvmlDeviceGetUtilizationRates gpu=0 at=100 for=800 once\n",
        samples=50, hz=50, constants={"HANG_S": 0.2},
    )  # fmt: skip
    states = [state for state, _ in itertools.groupby(sample.status[0] for sample in out.samples)]
    assert states == ["ok", "stale", "ok"]


def test_start_that_hangs(scenario):
    """NVML that does not come up is said; the session is not held up, and neither is leaving."""
    out = scenario("delay_init 20000\n", seconds=0.8, constants={"INIT_HANG_S": 0.3})
    assert [source.state for source in out.sources] == ["failed"]
    assert out.sources[0].text.startswith("NVML has not started after ")
    assert out.leaving_s < 1.0


def test_slow_sampling_is_sampled_less(scenario):
    """20 ms a sample at 100 Hz: the period grows to ten times the cost, and the note says so."""
    out = scenario("gpus 1\ndelay nvmlDeviceGetPerformanceState 20\n", samples=6, constants={"COST_SHARE": 0.1})
    gap_ms = (out.samples[-1].t - out.samples[-2].t) / 1000
    assert 150 <= gap_ms <= 1000
    assert out.samples[-1].notes["period"].startswith("a sample takes 2")
    assert out.samples[-1].cost_us >= 20_000


def test_deadlines(scenario):
    """Samples sit on a grid: at 40 Hz the mean gap is 25 ms, though each sample takes 6 ms of it."""
    out = scenario("gpus 1\ndelay nvmlDeviceGetPerformanceState 6\n", samples=31, hz=40)
    assert min(sample.cost_us for sample in out.samples) >= 6000
    assert (out.samples[-1].t - out.samples[0].t) / 30 == pytest.approx(25_000, rel=0.1)


def test_xid(scenario):
    """An XID is a mark at once, with the catalogue's words; an application's fault is a warning."""
    out = scenario("gpus 2\nxid gpu 1 at=100 code=94\nxid gpu 0 at=150 code=13\n", samples=60, hz=100)
    assert [(mark.text, mark.level, mark.code) for mark in out.marks] == [
        ("GPU 1: XID 94 (contained ECC error: restart the application)", "error", "xid"),
        ("GPU 0: XID 13 (graphics engine exception, mostly the application)", "warn", "xid"),
    ]


def test_xid_79_and_then_errors_for_ever(scenario):
    """After XID 79 the wait returns an error at once: the thread backs off instead of spinning."""
    out = scenario(
        "gpus 2\nxid gpu 0 at=100 code=79\nerr 0 * code=15 at=120\nerr * nvmlEventSetWait_v2 code=15 at=120\n",
        samples=60, hz=80,
    )  # fmt: skip
    assert [mark.text for mark in out.marks] == ["GPU 0: XID 79 (fell off the bus: reboot)"]
    assert out.samples[-1].status == ["lost", "ok"]
    assert len([call for call in out.called("nvmlEventSetWait_v2") if call[3] == 15]) <= 3


def test_xids_that_cannot_be_observed(scenario):
    """WSL and vGPU refuse events: the inventory says so, nothing else changes."""
    out = scenario("gpus 1\n" + CALLS + "err * nvmlDeviceRegisterEvents code=3\n")
    assert out.sources[0].descriptor["xid"] == "not observed: not supported on this GPU"
    assert out.samples[-1].status == ["ok"]


def test_an_xid_storm_is_told_in_powers_of_ten(scenario):
    """Twelve of the same: the first and the tenth are told."""
    storm = "".join(f"xid gpu 0 at={100 + n} code=63\n" for n in range(12))
    out = scenario("gpus 1\n" + storm, samples=60, hz=100)
    assert [mark.text for mark in out.marks] == [
        "GPU 0: XID 63 (memory row remapped)", "GPU 0: XID 63 (memory row remapped), 10 times",
    ]  # fmt: skip


@pytest.mark.parametrize("select", ["nvml:", "nvml:x", "nvml:1-", "amd", "nvml:,"])
def test_selections_that_are_none(select):
    """A mistake in --gpu is named before anything starts."""
    with pytest.raises(UsageError, match="--gpu"):
        GpuSource(0, select=select)


def test_a_selection_that_names_nothing(scenario):
    """`nvml:7` on a host with two."""
    out = scenario("gpus 2\n", select="nvml:7")
    assert out.sources[0].text == "no GPU readings: nvml:7 names none of the 2 GPUs of this host (0-1)"


def test_hz_is_limited():
    """Asking for 50 Hz gives 4: faster only loads the driver."""
    source = GpuSource(0, hz=50)
    assert source._sampler._wanted_period_s == 0.25
