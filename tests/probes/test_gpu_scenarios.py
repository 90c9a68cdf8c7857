"""The GPU probe against a scripted driver, through the genuine nvidia-ml-py: what the readings are, card by card."""

import pytest

CALLS = "clock calls 250\n"
"""Each sample of GPU 0 moves the library's clock by 250 ms."""
GIB = 1 << 30


def test_healthy(scenario):
    """Every column holds the scripted value in the product's unit, step by step."""
    out = scenario(
        "driver 570.86.15\ncuda 12080\ngpus 1\n" + CALLS + "gpu 0 mem_reserved=536870912 limit_mw=650000 links=18 "
        "tx_kib=3 rx_kib=5\n"
        "at 600 gpu 0 util=97 memutil=61 mem_used=64424509440 power_mw=612345 power_avg_mw=601000 sm=1755 temp=71 "
        "memtemp=83 margin=16 reasons=0 pstate=0\n",
        samples=5,
    )
    source = out.sources[0]
    assert (source.state, source.descriptor["driver"], source.descriptor["cuda_driver"]) == (
        "joined",
        "570.86.15",
        "12.8",
    )
    gpu = out.gpus[0]
    assert gpu["name"] == "NVIDIA H100 80GB HBM3"
    assert (gpu["index"], gpu["pci"], gpu["memory_total_bytes"]) == (0, "0000:10:00.0", 80 * GIB)
    assert (gpu["power_limit_watts"], gpu["power_limit_max_watts"], gpu["power_limit_min_watts"]) == (
        650.0,
        700.0,
        200.0,
    )
    assert (gpu["sm_clock_max_mhz"], gpu["memory_clock_max_mhz"], gpu["nvlink_links"]) == (1980, 2619, 18)
    assert gpu["margins_c"]["slowdown"] == -4
    assert "thresholds_c" not in gpu

    first, last = out.samples[0], out.samples[-1]
    assert (first.utilization_percent, first.power_watts, first.throttle_bits) == ([0], [70.0], [1])
    assert last.status == ["ok"]
    assert (last.utilization_percent, last.memory_utilization_percent) == ([97], [61])
    assert (last.memory_used_bytes, last.memory_reserved_bytes) == ([60 * GIB], [GIB // 2])
    assert last.memory_total_bytes == [80 * GIB]
    assert (last.power_watts, last.power_average_watts, last.power_limit_watts) == ([612.345], [601.0], [650.0])
    assert (last.sm_clock_mhz, last.memory_clock_mhz, last.pstate) == ([1755], [2619], [0])
    assert (last.temperature_c, last.memory_temperature_c, last.thermal_margin_c) == ([71], [83], [16])
    assert (last.pcie_generation, last.pcie_width, last.pcie_tx_bytes) == ([5], [16], [1000])
    assert (last.nvlink_tx_bytes, last.nvlink_rx_bytes) == ([3 * 1024], [5 * 1024])
    assert last.notes == {}


def test_energy_is_the_drivers_counter(scenario):
    """100 W over a second is 100 J more."""
    out = scenario("gpus 1\n" + CALLS + "gpu 0 power_mw=100000 energy_mj=5000000\n", samples=6)
    steps = [b.energy_j[0] - a.energy_j[0] for a, b in zip(out.samples[1:], out.samples[2:], strict=False)]
    assert steps == pytest.approx([25.0] * 4)
    assert out.samples[0].energy_j[0] >= 5000.0


def test_power_wall(scenario):
    """The mask, the cap's nanoseconds and the lowered clock are all there: 250 ms per sample at the cap."""
    out = scenario(
        "gpus 1\n" + CALLS + "at 250 gpu 0 util=100 power_mw=699000 reasons=4 sm=1590\n", samples=6
    )  # fmt: skip
    last = out.samples[-1]
    assert (last.throttle_bits, last.power_watts, last.sm_clock_mhz) == ([0x4], [699.0], [1590])
    grown = [b.throttle_ns["power_cap"][0] - a.throttle_ns["power_cap"][0]
             for a, b in zip(out.samples[2:], out.samples[3:], strict=False)]  # fmt: skip
    assert grown == [250_000_000] * 3
    assert last.throttle_ns["thermal_violation"] == [0]


def test_out_of_band_cap(scenario):
    """A cap set through the BMC: enforced 400 W though 700 W were asked for, and the cap's bit far below the limit."""
    out = scenario("gpus 1\n" + CALLS + "gpu 0 limit_mw=400000 reasons=4 power_mw=240000 util=99\n")
    assert (out.gpus[0]["power_limit_watts"], out.gpus[0]["power_limit_requested_watts"]) == (400.0, 700.0)
    assert (out.samples[-1].power_limit_watts, out.samples[-1].power_watts) == ([400.0], [240.0])
    assert out.samples[-1].throttle_bits == [0x4]


@pytest.mark.parametrize(
    ("driver", "base", "expected"),
    [
        ("550.54.15", 0, {}),
        ("570.86.15", 0, {}),
        ("575.51.03", 251, {"thermal": 251, "hw_thermal": 252, "power_brake": 253}),
        ("580.65.06", 251, {"thermal": 251, "hw_thermal": 252, "power_brake": 253}),
        ("580.70.01", 269, {}),
        ("580.82.07", 269, {"thermal": 269, "hw_thermal": 270, "power_brake": 271}),
        ("615.10.01", 269, {"thermal": 269, "hw_thermal": 270, "power_brake": 271}),
    ],
)
def test_thermal_counters_have_other_numbers_in_other_drivers(scenario, driver, base, expected):
    """The same field number is power smoothing in a neighbouring driver: only the driver's own numbers are read."""
    out = scenario(f"driver {driver}\nthrottle_ids {base}\ngpus 1\n" + CALLS + "gpu 0 reasons=96\n", samples=4)
    assert out.sources[0].descriptor["throttle_fields"] == expected
    asked = {int(call[0][6:]) for call in out.calls if call[0].startswith("field:")}
    assert asked & set(range(251, 274)) == set(expected.values())
    if expected:
        last, before = out.samples[-1].throttle_ns, out.samples[-2].throttle_ns
        assert last["thermal"][0] - before["thermal"][0] == 250_000_000
        assert last["hw_thermal"][0] - before["hw_thermal"][0] == 250_000_000
        assert last["power_brake"] == [0]
    else:
        assert not {"thermal", "hw_thermal", "power_brake"} & out.samples[-1].throttle_ns.keys()
    assert out.samples[-1].throttle_bits == [96]


def test_a_number_that_is_no_counter_is_dropped(scenario):
    """A driver that answers power smoothing where its counter should be: the bit holds, the number stays near 0."""
    out = scenario("driver 580.82.07\nthrottle_ids 0\ngpus 1\n" + CALLS + "gpu 0 reasons=32\n", samples=9)
    assert "thermal" in out.samples[0].throttle_ns
    assert "thermal" not in out.samples[-1].throttle_ns
    assert out.samples[-1].notes["throttle.thermal"] == "the driver gives another quantity under this number"


@pytest.mark.parametrize(("bits", "margin"), [(0x20, 3), (0x40 | 0x8, -2), (0x80 | 0x8, 30)])
def test_thermal_and_brake(scenario, bits, margin):
    """Soft and hard thermal limits and the power brake come as NVML's mask; a negative margin counts when it is hot."""
    out = scenario("gpus 1\n" + CALLS + f"gpu 0 temp=88 margin={margin} reasons={bits}\n")
    assert (out.samples[-1].throttle_bits, out.samples[-1].thermal_margin_c) == ([bits], [margin])


def test_a_margin_of_zero_on_a_cool_card_is_not_believed(scenario):
    """Some drivers answer 0 for the margin: unknown, with the reason."""
    out = scenario("gpus 1\n" + CALLS + "gpu 0 temp=40 margin=0 reasons=0\n")
    assert out.samples[-1].thermal_margin_c in ([], [None])
    assert "margin" in out.samples[-1].notes["thermal_margin_c"]


def test_consumer_card(scenario):
    """No ECC, no memory temperature, no energy counter, no MIG: None with a reason, never 0; the rest is there."""
    out = scenario(
        "gpus 1\n" + CALLS + "gpu 0 name=NVIDIA~GeForce~RTX~4090 arch=8 ecc=none memtemp=none energy_mj=none mig=none "
        "margin=none fan=30 power_mw=250000 reasons=0\n"
    )  # fmt: skip
    last = out.samples[-1]
    assert out.gpus[0]["name"] == "NVIDIA GeForce RTX 4090"
    assert "ecc" not in out.gpus[0]
    assert (last.memory_temperature_c, last.energy_j, last.thermal_margin_c) == ([], [], [])
    assert last.power_watts == [250.0]
    assert last.notes["memory_temperature_c"] == "not supported on this GPU"
    assert last.notes["energy_j"] == "not supported on this GPU"
    assert out.samples[0].health[0]["fan_percent"] == 30
    assert "ecc_uncorrected" not in out.samples[0].health[0]


def test_what_cannot_be_had_is_asked_for_once(scenario):
    """Ten samples: a call that is not supported is made once, a good one ten times; the 20 ms call never."""
    out = scenario("gpus 1\n" + CALLS + "gpu 0 margin=none\n", samples=10)
    assert len(out.called("nvmlDeviceGetMarginTemperature")) == 1
    assert len(out.called("nvmlDeviceGetUtilizationRates")) in (10, 11)
    assert out.called("nvmlDeviceGetPcieThroughput") == []
    assert len(out.called("nvmlInitWithFlags")) == 1


def test_calls_per_sample(scenario):
    """One batch and eight plain calls per GPU and sample; no field that failed for good is in the batch again."""
    out = scenario("gpus 1\n" + CALLS + "gpu 0 memtemp=none\n", samples=5)
    ticks = [at for name, _, at, _ in out.calls if name == "nvmlDeviceGetUtilizationRates"]
    between = [name for name, _, at, _ in out.calls if at == ticks[2] and not name.startswith(("field", "nvmlEvent"))]
    assert len(between) == 9
    assert between.count("nvmlDeviceGetFieldValues") == 1
    assert len(out.called("field:82")) == 1


def test_power_without_instant_reading(scenario):
    """An old card or driver: field 186 is unknown, so the plain reading counts, and the average is missing."""
    out = scenario(
        "gpus 1\n" + CALLS + "gpu 0 power_mw=none power_avg_mw=180000\nferr 0 185 code=3\nferr 0 190 code=3\n"
    )
    last = out.samples[-1]
    assert (last.power_watts, last.power_average_watts, last.power_limit_watts) == ([180.0], [], [700.0])
    assert "power_watts" not in last.notes
    assert last.notes["power_average_watts"] == "not supported on this GPU"


def test_a_driver_that_refuses_the_whole_batch(scenario):
    """INVALID_ARGUMENT for the batch: fields are tried one by one, once, and the plain calls stand in."""
    out = scenario("gpus 1\n" + CALLS + "err 0 nvmlDeviceGetFieldValues code=2\n", samples=6)
    last = out.samples[-1]
    assert (last.power_watts, last.power_limit_watts, last.power_average_watts) == ([70.0], [700.0], [])
    assert last.energy_j[0] > 0
    asked_late = [call for call in out.called("nvmlDeviceGetFieldValues") if call[2] > 500]
    assert asked_late == []


OLD_535 = (
    "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetSupportedClocksEventReasons", "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetMarginTemperature", "nvmlDeviceGetAddressingMode",
)  # fmt: skip
OLD_510 = (
    *OLD_535, "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3",
)  # fmt: skip


def test_driver_before_535(scenario):
    """Without the event-reasons and TemperatureV symbols the older calls answer."""
    out = scenario("driver 525.60.13\ngpus 1\n" + CALLS + "gpu 0 reasons=4 temp=66\n", missing=OLD_535)
    last = out.samples[-1]
    assert (last.throttle_bits, last.temperature_c, last.status) == ([4], [66], ["ok"])
    assert last.notes["thermal_margin_c"] == "the driver is too old for this reading"
    assert len(out.called("nvmlDeviceGetCurrentClocksThrottleReasons")) >= 4


def test_driver_before_510(scenario):
    """Memory v1 counts what the driver reserves as used, and there is no process list."""
    out = scenario("driver 470.57.02\ngpus 1\n" + CALLS + "gpu 0 procs=100:1000:C\n", missing=OLD_510)
    last = out.samples[-1]
    assert (last.memory_used_bytes, last.memory_reserved_bytes) == ([GIB + GIB // 2], [])
    assert out.samples[0].processes == []
    assert out.samples[0].notes["processes"] == "the driver is too old for this reading"


def test_margin_before_ada_comes_from_the_absolute_threshold(scenario):
    """Ampere: slowdown at 90 °C and 71 °C now leave 19 °C; T.Limit offsets are not asked for."""
    out = scenario("gpus 1\n" + CALLS + "gpu 0 arch=7 temp=71 margin=none slowdown_c=90 shutdown_c=95\n")
    assert out.gpus[0]["thresholds_c"] == {"slowdown": 90, "shutdown": 95}
    assert out.samples[-1].thermal_margin_c == [19]
    assert out.called("field:194") == []


def test_limit_offsets_of_ada_are_never_degrees(scenario):
    """Ada without a margin call: absolute thresholds are not taken for it."""
    out = scenario("gpus 1\n" + CALLS + "gpu 0 arch=8 temp=71 margin=none\n")
    assert out.samples[-1].thermal_margin_c == []
    assert out.called("nvmlDeviceGetTemperatureThreshold") == []


@pytest.mark.parametrize(
    "memory",
    ["mem_total=none", "mem_total=0", "mem_total=540000000000 addressing_mode=2", "mem_total=540000000000 bar1=none"],
)
def test_gb10_shares_the_systems_memory(scenario, memory):
    """Not supported, zero, or about the system's own size: what counts is the system's memory, and it is said."""
    out = scenario("gpus 1\n" + CALLS + f"gpu 0 name=NVIDIA~GB10 arch=10 {memory}\n")
    assert out.gpus[0]["unified_memory"] is True
    assert out.gpus[0]["memory_total_bytes"] == 527935000 * 1024
    assert out.samples[-1].memory_used_bytes == [127935000 * 1024]
    assert out.samples[-1].memory_total_bytes == [527935000 * 1024]


def test_a_big_card_in_a_small_host_keeps_its_own_memory(scenario):
    """80 GiB of its own on a host with 64 GiB: it has a BAR1 and no shared addressing, so it is no unified memory."""
    meminfo = "MemTotal: 67108864 kB\nMemAvailable: 1000000 kB\n"
    out = scenario("gpus 1\n" + CALLS, files={"proc/meminfo": meminfo})
    assert "unified_memory" not in out.gpus[0]
    assert out.samples[-1].memory_used_bytes == [GIB]


def test_jetson_that_answers_zeros(scenario):
    """Zeros from a board whose NVML knows nothing are unknown, and tegrastats is named."""
    out = scenario(
        "gpus 1\n" + CALLS + "gpu 0 name=Orin~(nvgpu) pci= arch=7 util=0 mem_total=0 mem_used=0 mem_reserved=0 "
        "sm=0 mem=0 sm_max=0 mem_max=0 temp=0 memtemp=0 power_mw=0 power_avg_mw=0 limit_mw=0 energy_mj=0 margin=none "
        "gen=0 width=0 slowdown_c=0 shutdown_c=0 pcie_tx=none pcie_rx=none reasons=0\n",
        files={"etc/nv_tegra_release": "# R36"},
    )  # fmt: skip
    last = out.samples[-1]
    assert (last.utilization_percent, last.sm_clock_mhz, last.temperature_c, last.power_watts) == ([], [], [], [])
    assert last.memory_used_bytes == [127935000 * 1024]
    assert "tegrastats" in last.notes["utilization_percent"]


def test_jetson_that_supports_nothing(scenario):
    """Every reading NOT_SUPPORTED is no error of the GPU: it is there, with nothing known but the reasons."""
    keys = ("util", "memutil", "mem_total", "sm", "mem", "temp", "power_mw", "power_avg_mw", "limit_mw", "energy_mj",
            "reasons", "pstate", "margin", "memtemp")  # fmt: skip
    out = scenario("gpus 1\n" + CALLS + f"gpu 0 name=Orin {' '.join(f'{key}=none' for key in keys)}\n")
    last = out.samples[-1]
    assert (last.status, last.utilization_percent, last.power_watts) == (["ok"], [], [])
    assert last.notes["utilization_percent"] == "not supported on this GPU"


def test_mig(scenario):
    """The whole GPU keeps power and clocks, its utilisation is N/A (MIG), each instance has its own memory."""
    out = scenario(
        "gpus 2\n" + CALLS + "mig gpu 0 instances=2 bytes=10737418240\n"
        "err 0 nvmlDeviceGetMemoryInfo_v2 code=4\nerr 0 nvmlDeviceGetMemoryInfo code=4\n"
        "gpu 0 power_mw=300000\ngpu 1 util=40\n"
    )  # fmt: skip
    assert [gpu["uuid"][:6] for gpu in out.gpus] == ["GPU-00", "MIG-00", "MIG-00", "GPU-00"]
    assert [gpu["index"] for gpu in out.gpus] == [0, 0, 0, 1]
    assert out.gpus[0]["mig"] == {"current": True, "pending": True}
    assert out.gpus[1]["mig_instance"] == {"gpu_instance": 7, "compute_instance": 0}
    last = out.samples[-1]
    assert last.utilization_percent == [None, None, None, 40]
    assert last.power_watts == [300.0, None, None, 70.0]
    assert last.notes["utilization_percent"] == "GPU 0: not reported in MIG mode"


def test_mig_instances_have_memory_of_their_own(scenario):
    """A quarter of each 10 GiB instance is used."""
    out = scenario("gpus 1\n" + CALLS + "mig gpu 0 instances=2 bytes=10737418240\n")
    assert out.samples[-1].memory_used_bytes == [GIB, 10 * GIB // 4, 10 * GIB // 4]
    assert out.samples[-1].memory_total_bytes == [80 * GIB, 10 * GIB, 10 * GIB]


def test_processes(scenario):
    """Compute, graphics and MPS processes with their memory; no name where PIDs are another namespace's; the list may
    grow between the two calls; rows that cannot be true are left out."""
    out = scenario(
        "gpus 1\n" + CALLS + "gpu 0 procs=4001:1048576:C,4002:na:G,4003:2048:M,4004:999999999999999:C proc_grow=2\n",
        samples=1,
    )  # fmt: skip
    found = {row["pid"]: row for row in out.samples[0].processes[0]}
    assert found.keys() == {4001, 4002, 4003, 90001, 90002}
    assert found[4001] == {"pid": 4001, "kind": "compute", "memory_bytes": 1048576}
    assert found[4002] == {"pid": 4002, "kind": "graphics"}
    assert found[4003]["kind"] == "compute"


def test_process_list_race(scenario):
    """More processes than the oversized array holds: that once the list is unknown, the rest of the sample is good."""
    out = scenario("gpus 1\n" + CALLS + "gpu 0 procs=4001:1:C proc_grow=20\n", samples=2)
    assert out.samples[0].processes in ([], [[]])
    assert out.samples[0].notes["processes"] == "the answer did not fit"
    assert out.samples[0].status == ["ok"]


def test_health(scenario):
    """ECC counts, row remapping, PCIe replays and the recovery action come with the slow readings."""
    out = scenario(
        "gpus 1\n" + CALLS + "gpu 0 ecc_corrected=7 ecc_uncorrected=2 remap_uncorrected=1 remap_pending=1 replays=9 "
        "recovery=1\n",
        samples=2,
    )  # fmt: skip
    health = out.samples[0].health[0]
    assert (health["ecc_corrected"], health["ecc_uncorrected"], health["pcie_replays"]) == (7, 2, 9)
    assert (health["rows_remapped_uncorrected"], health["remap_pending"], health["remap_failure"]) == (1, 1, 0)
    assert health["recovery_action"] == "reset"
    assert out.samples[1].health == []


def test_eight_gpus(scenario):
    """Each column has eight cells in the inventory's order."""
    lines = "".join(f"gpu {i} util={10 * i} power_mw={100000 + i}\n" for i in range(8))
    out = scenario("gpus 8\n" + CALLS + lines)
    assert [gpu["index"] for gpu in out.gpus] == list(range(8))
    assert out.samples[-1].utilization_percent == [10 * i for i in range(8)]
    assert out.samples[-1].power_watts == [100 + i / 1000 for i in range(8)]


def test_twelve_gpus_and_a_selection(scenario):
    """More than eight are fine; `nvml:9-10,2` opens those alone."""
    out = scenario("gpus 12\n" + CALLS, select="nvml:9-10,2")
    assert [gpu["index"] for gpu in out.gpus] == [2, 9, 10]
    assert {call[1] for call in out.calls} == {-1, 2, 9, 10}


def test_selection_by_uuid(scenario):
    """The beginning of a UUID chooses."""
    out = scenario("gpus 3\n" + CALLS, select="nvml:GPU-000000a2")
    assert [gpu["index"] for gpu in out.gpus] == [2]


def test_cuda_order_is_not_nvmls_order(scenario):
    """CUDA_VISIBLE_DEVICES by UUID: rows stay in NVML's order, each knows its CUDA number."""
    out = scenario(
        "gpus 3\n" + CALLS + "gpu 0 uuid=GPU-slow name=T4\ngpu 1 uuid=GPU-fast util=80\n", visible="GPU-fast,GPU-slow"
    )
    assert [(gpu["uuid"], gpu["cuda_index"]) for gpu in out.gpus] == [("GPU-slow", 1), ("GPU-fast", 0)]
    assert out.samples[-1].utilization_percent == [0, 80]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [("2,0", [0, 2]), ("1,9,0", [1]), ("GPU-000000a1", [1]), ("GPU-000000a", None), ("", None), ("-1", None)],
)
def test_cuda_visible_devices(scenario, visible, indices):
    """Numbers and unambiguous beginnings count up to the first entry that names nothing, as CUDA reads it."""
    out = scenario("gpus 3\n" + CALLS, visible=visible, samples=1)
    if indices is None:
        assert out.sources[0].state == "unavailable"
        assert "CUDA_VISIBLE_DEVICES" in out.sources[0].text
    else:
        assert [gpu["index"] for gpu in out.gpus] == indices
