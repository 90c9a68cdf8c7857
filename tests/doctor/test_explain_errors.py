"""`explain "ERROR TEXT"`: every row is found by a text as people paste it, and harmless texts find nothing."""

import re

import pytest

from lpxtop.doctor import explain_error
from lpxtop.doctor.explain import entries, find


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.id)
def test_a_row_is_found_by_its_sample(entry):
    """The sample's first match is its own row, and the row says cause, check and cure in 80 columns."""
    assert find(entry.sample)[0].id == entry.id
    text = explain_error(entry.sample)
    assert text is not None
    assert text.startswith(entry.title)
    for word in ("cause", "check", "cure"):
        assert re.search(rf"^  {word} ", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 90


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch", "driver.mismatch"),
        ("nvidia-smi has failed because it couldn’t communicate with the NVIDIA driver.", "driver.communicate"),
        (
            'Error response from daemon: could not select device driver "nvidia" with capabilities: [[gpu compute]]',
            "ctr.device_driver",
        ),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", "cuda.oom"),
        (
            "allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory",
            "cuda.oom",
        ),
        ("sm_120 is not compatible with the current PyTorch installation", "cuda.no_kernel_image"),
        ("[Fri May  3 10:11:12 2024] NVRM: Xid (PCI:0000:c1:00): 95, pid=1, Uncontained ECC error", "xid.ecc"),
        ("XID 119", "xid.gsp"),
        ("Xid 79", "xid.79"),
        ("0x80070002", "windows.file_not_found"),
        ("0xE6000000", "windows.application_defined"),
        ("HTTP/1.1 429 Too Many Requests", "http.429"),
        ("429", "http.429"),
        ("HTTP 503", "net.gateway"),
        ("error 504 from upstream", "net.timeout"),
        ("{'error': {'code': 'context_length_exceeded'}}", "http.context"),
        ("the request exceeds the available context size, try increasing it", "http.context"),
        ("dial tcp 10.0.0.1:8000: connect: connection refused", "net.refused"),
        ("Error 803: system has unsupported display driver / cuda driver combination", "driver.combination"),
        ("nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4", "cuda.driver_insufficient"),
        ("Warning  FailedScheduling  0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", "k8s.no_gpu"),
    ],
)
def test_other_wordings(text, name):
    """Texts of other tools and versions for the same error lead to the same row."""
    assert find(text)[0].id == name


@pytest.mark.parametrize(
    "text",
    ["", "hello", "ttft", "the answer has 429 tokens", "served 503 requests in 504 s", "pid 401", "itl p95 79 ms"],
)
def test_harmless_texts(text):
    """What is no error is not explained as one."""
    assert explain_error(text) is None


def test_an_xid_without_a_row():
    """An XID that has no row is named with its meaning, or as unknown; never invented."""
    assert explain_error("NVRM: Xid (PCI:0000:01:00): 121, x").startswith("XID 121: chip-to-chip link error")
    assert "not in this table" in explain_error("Xid 999")


def test_a_log_with_several_errors():
    """A pasted log gives at most three explanations, each once."""
    log = "\n".join(entry.sample for entry in entries()[:6])

    assert len(explain_error(log).split("\n\n")) == 3


def test_ids_are_unique_and_xids_belong_to_one_row():
    """A number or an id never leads to two rows."""
    ids = [entry.id for entry in entries()]
    numbers = [number for entry in entries() for number in entry.xids]

    assert len(ids) == len(set(ids))
    assert len(numbers) == len(set(numbers))
