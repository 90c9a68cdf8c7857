"""Which GPUs: `nvml:0-3`, `nvml:GPU-3af1`, a CUDA_VISIBLE_DEVICES text. Must not read the environment."""

import re
from collections.abc import Sequence
from typing import TypeVar

from lpxtop.errors import UsageError
from lpxtop.probes.device import Device, MigInstance

AnyDevice = Device | MigInstance
T = TypeVar("T", bound=AnyDevice)


class Selection:
    """What the user chose. `indices` is None when every GPU has to be opened to know; `explicit` when GPUs were named.

    `select`: None or `nvml` for all, else `nvml:` and a list of NVML indexes, ranges and beginnings of UUIDs. `visible`
    is a CUDA_VISIBLE_DEVICES text. Raises UsageError.
    """

    def __init__(self, select: str | None = None, visible: str | None = None) -> None:
        self._text = select
        self._tokens = _tokens(select)
        self._visible = None if visible is None else [part.strip() for part in visible.split(",")]
        numbers = [token for token in self._tokens or () if isinstance(token, int)]
        self.explicit = self._tokens is not None
        self.indices = set(numbers) if self._tokens is not None and len(numbers) == len(self._tokens) else None

    def choose(self, parts: Sequence[AnyDevice]) -> list[AnyDevice]:
        """The chosen of all GPUs and their MIG instances, in NVML's order; a chosen instance brings its GPU along.

        With `visible`, each gets its CUDA number as `inventory["cuda_index"]`.
        """
        chosen = [part for part in parts if self._tokens is None or any(_is(token, part) for token in self._tokens)]
        if self._visible is not None:
            chosen = _visible(self._visible, chosen)
        indices = {part.index for part in chosen}
        return [part for part in parts if part in chosen or (isinstance(part, Device) and part.index in indices)]

    def __str__(self) -> str:
        if self._visible is not None:
            return f"CUDA_VISIBLE_DEVICES={','.join(self._visible)}"
        return self._text or "nvml"


def _tokens(select: str | None) -> list[int | str] | None:
    name, colon, text = (select or "nvml").partition(":")
    if name != "nvml" or (colon and not text.strip(" ,")):
        raise UsageError(f"--gpu {select}: not a choice of GPUs", "use nvml, nvml:0, nvml:0-3,6 or nvml:GPU-3af1")
    tokens: list[int | str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        numbers = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        if numbers:
            first, last = int(numbers[1]), int(numbers[2] if numbers[2] is not None else numbers[1])
            tokens += range(first, last + 1)
        elif part.startswith(("GPU-", "MIG-")):
            tokens.append(part)
        else:
            raise UsageError(f"--gpu {select}: '{part}' is no GPU", "use nvml:0, nvml:0-3,6 or nvml:GPU-3af1")
    return tokens if colon else None


def _is(token: int | str, part: AnyDevice) -> bool:
    if isinstance(token, int):
        return part.index == token
    return str(part.inventory.get("uuid", "")).lower().startswith(token.lower())


def _visible(tokens: list[str], parts: Sequence[AnyDevice]) -> list[AnyDevice]:
    """CUDA's reading of the list: up to the first entry that names nothing. Numbers count GPUs in NVML's order, which
    is CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID, or when all GPUs are alike."""
    gpus = [part for part in parts if isinstance(part, Device)]
    found: list[AnyDevice] = []
    for token in tokens:
        part = _find(token, gpus, parts)
        if part is None or part in found:
            break
        part.inventory["cuda_index"] = len(found)
        found.append(part)
    instances = [part for part in parts if isinstance(part, MigInstance) and any(g.index == part.index for g in found)]
    return found + [part for part in instances if not any(isinstance(f, MigInstance) for f in found)]


def _find(token: str, gpus: Sequence[Device], parts: Sequence[AnyDevice]) -> AnyDevice | None:
    if token.isdecimal():
        return gpus[int(token)] if int(token) < len(gpus) else None
    matches = [part for part in parts if token.startswith(("GPU-", "MIG-")) and _is(token, part)]
    return matches[0] if len(matches) == 1 else None
