"""Rows of expert tensors as bytes, on whatever device they lie: seen in place, copied, hashed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .expertmaps_hook_env import HookError
else:
    from expertmaps_hook_env import HookError

HASH_BYTES = 16 << 20
"""Bytes hashed at once; hashing needs about six times as much on the device for a moment."""

GOLDEN, MIX_A, MIX_B = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Constants of splitmix64 as signed integers."""


@dataclass(frozen=True)
class Layout:
    """How the rows of one tensor are laid out."""

    shape: tuple[int, ...]
    """Of one row."""
    strides: tuple[int, ...]
    """Within a row, in elements."""
    dtype: Any
    row_bytes: int

    @classmethod
    def of(cls, tensor: Any, place: str) -> Layout:
        """Layout of [rows, ...]. Raises HookError (UnknownTensor): a row is not one piece."""
        numbers = 1
        for size in tensor.shape[1:]:
            numbers *= int(size)
        pairs = zip(tensor.stride()[1:], tensor.shape[1:], strict=True)
        expected = 1
        for stride, size in sorted((int(stride), int(size)) for stride, size in pairs if size != 1):
            if stride != expected:
                expected = 0
                break
            expected *= size
        follow = int(tensor.shape[0]) == 1 or int(tensor.stride(0)) == numbers
        if expected != numbers or not follow or not numbers:
            raise HookError(
                "UnknownTensor",
                f"{place}: {list(tensor.shape)} with strides {list(tensor.stride())}, "
                "expected rows that are each one piece and follow each other",
            )
        return cls(
            tuple(int(size) for size in tensor.shape[1:]),
            tuple(int(stride) for stride in tensor.stride()[1:]),
            tensor.dtype,
            numbers * int(tensor.element_size()),
        )

    def flat(self, tensor: Any) -> Any:
        """The tensor's own memory as uint8 [rows, row_bytes]."""
        import torch

        numbers = self.row_bytes // int(tensor.element_size())
        size, strides = (int(tensor.shape[0]), numbers), (numbers, 1)
        return torch.as_strided(tensor, size, strides, tensor.storage_offset()).view(torch.uint8)

    def tensor(self, memory: Any) -> Any:
        """uint8 [rows, row_bytes] as [rows, ...] of this type and these strides within a row."""
        typed = memory.view(-1).view(self.dtype)
        numbers = self.row_bytes // int(typed.element_size())
        return typed.as_strided((int(memory.shape[0]), *self.shape), (numbers, *self.strides))


def copy_rows(source: Any, order: Sequence[int], target: Any) -> None:
    """target[i] = source[order[i]], both uint8 [rows, bytes]."""
    for place, row in enumerate(order):
        target[place].copy_(source[row])


def hashes(memory: Any) -> list[int]:
    """A 64-bit hash of each row of uint8 [rows, bytes], computed where the memory lies.

    Multilinear (Carter and Wegman): the sum over 32-bit words of word times a fixed random odd
    number of 64 bits for its place, modulo 2**64; bytes are the words of a row that 4 does not
    divide. Reads a cold row over the same path as the kernel does.
    """
    import torch

    count, size = int(memory.shape[0]), int(memory.shape[1])
    together = max(1, HASH_BYTES // size)
    word = 4 if size % 4 == 0 else 1
    factors = _factors(size // word, memory.device)
    found: list[int] = []
    for low in range(0, count, together):
        part = memory[low : low + together]
        if word == 4:
            aligned = part if part.storage_offset() % 4 == 0 else part.clone()
            part = aligned.view(torch.int32)
        found.extend((part.to(torch.int64) * factors).sum(1).tolist())
    return found


def _factors(count: int, device: Any) -> Any:
    """The numbers of the hash, int64 [count]: splitmix64 of the place, made odd."""
    import torch

    value = torch.arange(1, count + 1, dtype=torch.int64, device=device) * GOLDEN
    for shift, factor in ((30, MIX_A), (27, MIX_B)):
        value = (value ^ _shifted(value, shift)) * factor
    return (value ^ _shifted(value, 31)) | 1


def _shifted(value: Any, bits: int) -> Any:
    """A shift to the right that fills with zeros."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def differing(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Places at which two lists of hashes differ; a missing one differs."""
    longest = max(len(left), len(right))
    pairs = ((list(side) + [None] * longest)[:longest] for side in (left, right))
    return [place for place, (one, other) in enumerate(zip(*pairs, strict=True)) if one != other]


def shell(layout: Layout, rows: int, device: Any) -> Any:
    """A tensor of the shape and type of all rows that owns one element.

    For a parameter whose rows were moved: the engine reads the problem's size from its shape.
    """
    import torch

    element = torch.zeros(16, dtype=torch.uint8, device=device).view(layout.dtype)
    shape = (rows, *layout.shape)
    return element.as_strided(shape, (0,) * len(shape))
