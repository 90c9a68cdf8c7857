"""Asking NVML for readings of one GPU and remembering what cannot be had, so that it is asked for once.

A reading is None when nobody has it; `why` says the reason. Must not know which readings there are.
"""

from typing import Any

from lpxtop.probes import nvml
from lpxtop.probes.nvml import Library, NvmlFailure

Call = tuple[Any, ...]
"""pynvml's function name and its arguments, the handle (which has no hash) first."""

MAX_REST = 60
"""A call that keeps failing is made once in so many samples at least."""
FIELD_TRIES = 3


class Lost(Exception):
    """The GPU is gone: its handle must not be used again."""


class Readings:
    """The readings of one GPU. `answered` and `failures` (codes that may pass) are of the sample since `begin`."""

    def __init__(self, library: Library) -> None:
        self.why: dict[str, str] = {}
        self.mig = False
        self.answered = 0
        self.failures: list[int] = []
        self._library = library
        self._never: dict[Call, int] = {}  # by name and arguments without the handle
        self._failed: dict[Call, int] = {}
        self._rest: dict[Call, int] = {}

    def begin(self) -> None:
        self.answered, self.failures = 0, []

    @property
    def silent(self) -> bool:
        """Nothing answered, though it may again."""
        return not self.answered and bool(self._failed)

    def ask(self, column: str, *calls: Call) -> Any:
        """The first answer of `calls` (later ones are for older drivers); None when there is none. Raises Lost."""
        code = None
        for call in calls:
            key = (call[0], *call[2:])
            if key in self._never:
                code = self._never[key]
                continue
            if self._rests(key):
                return None
            try:
                answer = self._library.call(*call)
            except NvmlFailure as failure:
                code = self._note(key, failure.code)
                if code in nvml.PERMANENT:
                    continue
                break
            self._works(key)
            self.why.pop(column, None)
            return answer
        if code is not None:
            self.missing(column, code)
        return None

    def quietly(self, *call: Any) -> Any:
        """Like `ask` for something that has no column: nobody is told why it is missing."""
        answer = self.ask("", call)
        self.why.pop("", None)
        return answer

    def missing(self, column: str, code: int) -> None:
        """Say why a column is missing."""
        self.why[column] = "not reported in MIG mode" if self.mig and code == 3 else nvml.reason(code)

    def fields(self, handle: Any, wanted: list[tuple[int, int]]) -> Any:
        """The values of (field id, scope) pairs, one driver call. Raises Lost; NvmlFailure if the whole call failed."""
        key = ("nvmlDeviceGetFieldValues",)
        if self._rests(key):
            raise NvmlFailure(nvml.TIMED_OUT)
        try:
            values = self._library.call(*key, handle, wanted)
        except NvmlFailure as failure:
            if failure.code not in nvml.PERMANENT:
                self._note(key, failure.code)
            raise
        self._works(key)
        return values

    def _works(self, key: Call) -> None:
        self.answered += 1
        if self._failed:
            self._failed.pop(key, None)

    def _note(self, key: Call, code: int) -> int:
        if code in nvml.LOST:
            raise Lost(nvml.LOST[code])
        if code in nvml.PERMANENT:
            self._never[key] = code
        else:
            self.failures.append(code)
            times = self._failed[key] = self._failed.get(key, 0) + 1
            self._rest[key] = min(2 ** min(times, 10) - 2, MAX_REST)
        return code

    def _rests(self, key: Call) -> bool:
        left = self._rest.get(key, 0)
        if left:
            self._rest[key] = left - 1
        return left > 0


class FieldBatch:
    """Many fields, one driver call. A field the driver does not have is left out for good after a few tries."""

    def __init__(self, readings: Readings, handle: Any, fields: dict[str, tuple[int, int]]) -> None:
        self._readings, self._handle = readings, handle
        self._wanted = dict(fields)
        self._tries: dict[str, int] = {}
        self._pruned = False

    def drop(self, name: str, why: str) -> None:
        """Never ask for a field again: what it gives is not what it should be."""
        self._wanted.pop(name, None)
        self._readings.why[name] = why

    def read(self) -> dict[str, Any]:
        """Values by the fields' names; absent when not known. Raises Lost."""
        names = list(self._wanted)
        try:
            values = self._readings.fields(self._handle, list(self._wanted.values())) if names else ()
        except NvmlFailure as failure:
            self._whole_call_failed(failure.code)
            return {}
        found = {}
        for name, value in zip(names, values, strict=True):
            if value.nvmlReturn == 0:
                found[name] = nvml.field_value(value)
                self._tries.pop(name, None)
                self._readings.why.pop(name, None)
            else:
                self._field_failed(name, int(value.nvmlReturn))
        return found

    def _whole_call_failed(self, code: int) -> None:
        for name in self._wanted:
            self._readings.missing(name, code)
        if code in nvml.PERMANENT:
            self._wanted = {} if self._pruned else {n: f for n, f in self._wanted.items() if self._works_alone(f)}
            self._pruned = True

    def _works_alone(self, field: tuple[int, int]) -> bool:
        """Some drivers refuse the whole batch because of one field."""
        try:
            self._readings.fields(self._handle, [field])
        except NvmlFailure as failure:
            return failure.code not in nvml.PERMANENT
        return True

    def _field_failed(self, name: str, code: int) -> None:
        self._readings.missing(name, code)
        self._tries[name] = self._tries.get(name, 0) + 1
        may_pass = code in nvml.WORDS and code not in nvml.PERMANENT
        if code in nvml.PERMANENT or (self._tries[name] >= FIELD_TRIES and not may_pass):
            self._wanted.pop(name)
