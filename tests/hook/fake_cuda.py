"""A libcudart that registers nothing: it stands for a GPU's driver, which this machine has not.

It has the calls the hook makes, notes them in order, and keeps what is registered. The memory
itself is real host memory, so a CPU tensor over the "device" address reads the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAMES = {1: b"cudaErrorInvalidValue", 2: b"cudaErrorMemoryAllocation", 713: b"cudaErrorHostMemoryNotRegistered"}  # noqa: E501  # fmt: skip


class Function:
    """Something that is called and that ctypes attributes can be set on."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.argtypes: list[Any] = []
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        assert not self.argtypes or len(arguments) == len(self.argtypes)
        return self._call(*arguments)


class FakeCudart:
    """Calls by name; `fail_at` is the place in `calls` whose call answers with an error."""

    def __init__(self, calls: list[str] | None = None, fail_at: int = -1, code: int = 2) -> None:
        self.calls = [] if calls is None else calls
        self.fail_at, self.code = fail_at, code
        self.registered: dict[int, int] = {}
        self.last_error = 0
        self.cudaHostRegister = Function(self._register)
        self.cudaHostGetDevicePointer = Function(self._pointer)
        self.cudaHostUnregister = Function(self._unregister)
        self.cudaGetErrorName = Function(lambda code: NAMES.get(code))
        self.cudaGetLastError = Function(self._get_last)

    def _note(self, name: str) -> int:
        self.calls.append(name)
        self.last_error = self.code if len(self.calls) - 1 == self.fail_at else 0
        return self.last_error

    def _register(self, address: int, size: int, flags: int) -> int:
        code = self._note("register")
        if not code:
            assert flags == 2 and size > 0 and size % 4096 == 0 and address % 4096 == 0
            assert address not in self.registered
            self.registered[address] = size
        return code

    def _pointer(self, target: Any, address: int, flags: int) -> int:
        code = self._note("pointer")
        if not code:
            assert flags == 0 and address in self.registered
            target._obj.value = address
        return code

    def _unregister(self, address: int) -> int:
        code = self._note("unregister")
        if not code:
            if address not in self.registered:
                return 713
            del self.registered[address]
        return code

    def _get_last(self) -> int:
        found, self.last_error = self.last_error, 0
        return found


class FakeLibc:
    """The real mapping calls, noted in the same list and able to fail at a place of it."""

    def __init__(self, real: Any, calls: list[str], fail_at: int = -1) -> None:
        self._real, self.calls, self.fail_at = real, calls, fail_at
        self.mapped: dict[int, int] = {}

    def map_anonymous(self, size: int) -> int:
        self.calls.append("map")
        if len(self.calls) - 1 == self.fail_at:
            raise OSError(12, "mmap: Cannot allocate memory")
        address = int(self._real.map_anonymous(size))
        self.mapped[address] = size
        return address

    def unmap(self, address: int, size: int) -> None:
        self.calls.append("unmap")
        assert self.mapped.pop(address) == size
        self._real.unmap(address, size)
