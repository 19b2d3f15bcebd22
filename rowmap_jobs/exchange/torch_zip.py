"""A reader of torch `.pt` zip files that runs nothing: an interpreter of 30 opcodes.

`torch.save` writes a zip of `<name>/data.pkl` (a protocol 2 pickle that has only containers,
numbers, strings and calls of rebuild functions) and one stored member `<name>/data/<key>` for
each storage (torch/serialization.py). The pickle module is not used. Of the pickle language only
what those files need is known here; a global is a word that is compared with a list, and the
only "calls" are a view of a storage and an empty dict. Everything else is refused by name.
"""

from __future__ import annotations

import math
import pickletools  # only its table of opcode names, for refusals
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO, ClassVar, Literal, TypeGuard

import numpy as np
import numpy.typing as npt

from ..formats.base import FormatError
from .npz import check_directory
from .torch_ops import MAX_OBJECTS, BadError, Cursor, Word

MAX_UNPACKED = 1 << 30
MAX_PICKLE = 16 << 20
"""A per-token dump of about five million tokens."""
MAX_ELEMENTS = 1 << 27
"""Of one tensor, also of one that repeats its storage by a stride of zero."""

Array = npt.NDArray[np.generic]

_TYPES = {
    "ByteStorage": "u1",
    "CharStorage": "i1",
    "ShortStorage": "i2",
    "IntStorage": "i4",
    "LongStorage": "i8",
    "BoolStorage": "?",
    "HalfStorage": "f2",
    "FloatStorage": "f4",
    "DoubleStorage": "f8",
}
_REBUILD = Word("torch._utils", "_rebuild_tensor_v2")
_ORDERED = Word("collections", "OrderedDict")
_KNOWN = {word: word for word in (_REBUILD, _ORDERED, *(Word("torch", name) for name in _TYPES))}
_NAMES = {op.code.encode("latin-1")[0]: op.name for op in pickletools.opcodes}
_SIDE = {"byteorder", "version", ".format_version", ".storage_alignment", ".data/serialization_id"}
_MARK = object()


@dataclass(frozen=True)
class _Storage:
    body: bytes
    dtype: np.dtype[np.generic]
    elements: int


class _Members:
    """The members of the zip, read on demand and once."""

    def __init__(self, stream: BinaryIO, source: str) -> None:
        self.source = source
        try:
            check_directory(stream, source)
        except FormatError as error:
            expected = error.expected.replace(".npz", "torch zip")
            raise FormatError(source, error.place, error.found, expected) from None
        try:
            self._zip = zipfile.ZipFile(stream)
            infos = self._zip.infolist()
        except Exception as error:  # zipfile raises many kinds on damaged bytes
            raise FormatError(source, "archive", type(error).__name__, "a torch zip file") from None
        self._infos = self._checked(infos)
        self._read: dict[str, bytes] = {}

    def _checked(self, infos: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
        out: dict[str, zipfile.ZipInfo] = {}
        prefixes = set()
        for info in infos:
            prefix, _, name = info.filename.partition("/")
            prefixes.add(prefix)
            known = name == "data.pkl" or name in _SIDE or re.fullmatch(r"data/[0-9]{1,9}", name)
            if not known or prefix in ("", ".", "..") or "\\" in prefix:
                expected = "data.pkl, data/<n>, byteorder, version below one folder"
                raise FormatError(self.source, "members", info.filename, expected)
            if name in out:
                raise FormatError(self.source, "members", f"{name} twice", "each member once")
            if info.flag_bits & 1 or info.compress_type not in (0, 8):
                found = "an encrypted or exotic member"
                raise FormatError(self.source, info.filename, found, "stored or deflated")
            out[name] = info
        if len(prefixes) != 1 or "data.pkl" not in out:
            found = f"{len(prefixes)} folders" if len(prefixes) != 1 else "no data.pkl"
            raise FormatError(self.source, "members", found, "one folder with a data.pkl")
        total = sum(info.file_size for info in infos)
        if total > MAX_UNPACKED:
            expected = f"at most {MAX_UNPACKED}"
            raise FormatError(self.source, "unpacked size", f"{total} bytes", expected)
        return out

    def size(self, name: str) -> int:
        info = self._infos.get(name)
        if info is None:
            raise FormatError(self.source, name, "no such member", "every storage in the zip")
        return info.file_size

    def read(self, name: str) -> bytes:
        limit = self.size(name)
        if name not in self._read:
            try:
                with self._zip.open(self._infos[name]) as member:
                    body = member.read(limit + 1)
            except Exception as error:  # zipfile and zlib raise many kinds on damaged bytes
                found = type(error).__name__
                raise FormatError(self.source, name, found, "an undamaged member") from None
            if len(body) != limit:
                raise FormatError(self.source, name, f"{len(body)} bytes", f"{limit} as declared")
            self._read[name] = body
        return self._read[name]

    def order(self) -> Literal["<", ">"]:
        """`<` or `>`: files without the member are of little-endian machines."""
        if "byteorder" not in self._infos:
            return "<"
        word = self.read("byteorder") if self.size("byteorder") <= 8 else b"?"
        if word not in (b"little", b"big"):
            raise FormatError(self.source, "byteorder", "another word", "little or big")
        return "<" if word == b"little" else ">"


def load(stream: BinaryIO | bytes, source: str) -> object:
    """The saved object of None, bool, int, float, str, list, tuple, dict and read-only arrays.

    Raises FormatError: no torch zip (a file from before torch 1.6 is refused by name), members
    that torch does not write, an opcode or global that data does not need (named), a storage
    that is missing or has another size than the tensor says, sizes beyond the limits above.
    """
    stream = BytesIO(stream) if isinstance(stream, bytes) else stream
    start = stream.read(4)
    stream.seek(0)
    if start[:1] == b"\x80":
        expected = "a torch zip file (save again with torch 1.6 or later)"
        raise FormatError(source, "byte 0", "a bare pickle (legacy torch.save)", expected)
    members = _Members(stream, source)
    if members.size("data.pkl") > MAX_PICKLE:
        found = f"{members.size('data.pkl')} bytes"
        raise FormatError(source, "data.pkl", found, f"at most {MAX_PICKLE}")
    machine = _Machine(members)
    try:
        return machine.run()
    except BadError as error:
        place = f"data.pkl byte {machine.at}"
        raise FormatError(source, place, error.found, error.expected) from None


class _Machine:
    """One run over data.pkl; every opcode is bounded by the bytes it takes or by MAX_OBJECTS."""

    def __init__(self, members: _Members) -> None:
        self._members = members
        self._order = members.order()
        self._cursor = Cursor(members.read("data.pkl"))
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}
        self._objects = 0
        self.at = 0

    def run(self) -> object:
        if self._cursor.take(2) != b"\x80\x02":
            raise BadError("another start", "a pickle of protocol 2")
        while True:
            self.at = self._cursor.at
            code = self._cursor.take(1)[0]
            if code == ord("."):
                break
            step = self._STEPS.get(code)
            if step is None:
                raise BadError(f"opcode {_NAMES.get(code, hex(code))}", "opcodes of plain data")
            step(self)
        if len(self._stack) != 1 or self._stack[0] is _MARK or not self._cursor.done():
            raise BadError("more than one object", "one object and the end of the file")
        return self._stack[0]

    # Stack and memo

    def _pop(self) -> object:
        if not self._stack or self._stack[-1] is _MARK:
            raise BadError("an opcode without its operand", "a complete pickle")
        return self._stack.pop()

    def _top(self) -> object:
        value = self._pop()
        self._stack.append(value)
        return value

    def _since_mark(self) -> list[object]:
        items: list[object] = []
        while self._stack:
            value = self._stack.pop()
            if value is _MARK:
                return items[::-1]
            items.append(value)
        raise BadError("an opcode without its MARK", "a complete pickle")

    def _made(self, value: object) -> None:
        self._objects += 1
        if self._objects > MAX_OBJECTS:
            raise BadError(f"more than {MAX_OBJECTS} containers", "fewer")
        self._stack.append(value)

    def _put(self, key: int) -> None:
        self._objects += 1
        if self._objects > MAX_OBJECTS:
            raise BadError(f"more than {MAX_OBJECTS} containers", "fewer")
        self._memo[key] = self._top()

    def _get(self, key: int) -> None:
        if key not in self._memo:
            raise BadError(f"memo {key} before it was put", "a complete pickle")
        self._stack.append(self._memo[key])

    # Containers

    def _tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._made(tuple(items[::-1]))

    def _append(self, items: list[object]) -> None:
        target = self._top()
        if type(target) is not list:
            raise BadError("APPEND to no list", "a list")
        target.extend(items)

    def _set(self, items: list[object]) -> None:
        target = self._top()
        if type(target) is not dict or len(items) % 2:
            raise BadError("SETITEM to no dict", "a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int):
                raise BadError(f"a key of type {type(key).__name__}", "text or an integer")
            if key in target:
                raise BadError(f"the key {key!r} twice", "each key once")
            target[key] = value

    def _set_one(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    # Globals, storages, calls

    def _global(self) -> None:
        word = Word(self._cursor.line(), self._cursor.line())
        if word not in _KNOWN:
            raise BadError(
                f"GLOBAL {word.module} {word.name}", "a tensor's rebuild function or storage"
            )
        self._stack.append(_KNOWN[word])

    def _persistent(self) -> None:
        pid = self._pop()
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
            raise BadError("BINPERSID of another kind", "('storage', type, key, device, elements)")
        _, kind, key, device, elements = pid
        if not isinstance(kind, Word) or kind.name not in _TYPES or type(device) is not str:
            raise BadError("BINPERSID of another kind", "a storage of this file")
        if type(key) is not str or not re.fullmatch("[0-9]{1,9}", key) or type(elements) is not int:
            raise BadError("BINPERSID with another key", "a storage of this file")
        dtype = np.dtype(_TYPES[kind.name]).newbyteorder(self._order)
        size = self._members.size(f"data/{key}")
        if not 0 <= elements <= MAX_UNPACKED or elements * dtype.itemsize != size:
            found = f"storage {key} of {elements} elements in {size} bytes"
            raise BadError(found, f"{dtype.itemsize} bytes an element")
        self._made(_Storage(self._members.read(f"data/{key}"), dtype, elements))

    def _reduce(self) -> None:
        args, call = self._pop(), self._pop()
        if call is _ORDERED and type(args) is tuple and not args:
            self._made({})
        elif call is _REBUILD and type(args) is tuple and len(args) in (6, 7):
            self._made(_view(args))
        else:
            name = f"{call.module} {call.name}" if isinstance(call, Word) else type(call).__name__
            raise BadError(f"REDUCE of {name}", "the call of a tensor's rebuild function")

    _STEPS: ClassVar[dict[int, Callable[[_Machine], None]]] = {
        ord("("): lambda m: m._stack.append(_MARK),
        ord("N"): lambda m: m._stack.append(None),
        0x88: lambda m: m._stack.append(True),
        0x89: lambda m: m._stack.append(False),
        ord("K"): lambda m: m._stack.append(m._cursor.unsigned(1)),
        ord("M"): lambda m: m._stack.append(m._cursor.unsigned(2)),
        ord("J"): lambda m: m._stack.append(m._cursor.signed(4)),
        0x8A: lambda m: m._stack.append(m._cursor.long()),
        ord("G"): lambda m: m._stack.append(m._cursor.double()),
        ord("X"): lambda m: m._stack.append(m._cursor.text()),
        ord("]"): lambda m: m._made([]),
        ord("}"): lambda m: m._made({}),
        ord(")"): lambda m: m._stack.append(()),
        ord("t"): lambda m: m._made(tuple(m._since_mark())),
        0x85: lambda m: m._tuple(1),
        0x86: lambda m: m._tuple(2),
        0x87: lambda m: m._tuple(3),
        ord("a"): lambda m: m._append([m._pop()]),
        ord("e"): lambda m: m._append(m._since_mark()),
        ord("s"): lambda m: m._set_one(),
        ord("u"): lambda m: m._set(m._since_mark()),
        ord("q"): lambda m: m._put(m._cursor.unsigned(1)),
        ord("r"): lambda m: m._put(m._cursor.unsigned(4)),
        ord("h"): lambda m: m._get(m._cursor.unsigned(1)),
        ord("j"): lambda m: m._get(m._cursor.unsigned(4)),
        ord("c"): lambda m: m._global(),
        ord("Q"): lambda m: m._persistent(),
        ord("R"): lambda m: m._reduce(),
    }


def _view(args: tuple[object, ...]) -> Array:
    """What `_rebuild_tensor_v2(storage, offset, size, stride, grad, hooks)` would return."""
    storage, offset, size, stride = args[:4]
    if not isinstance(storage, _Storage) or not _is_natural(offset):
        raise BadError("a tensor without a storage", "a view of a storage")
    if not _are_natural(size) or not _are_natural(stride) or len(size) != len(stride):
        raise BadError("a tensor of strange size or stride", "sizes and strides of 0 or more")
    if len(size) > 8:
        raise BadError(f"a tensor of {len(size)} dimensions", "at most 8")
    if math.prod(size) > MAX_ELEMENTS:
        raise BadError(f"a tensor of {math.prod(size)} elements", f"at most {MAX_ELEMENTS}")
    if math.prod(size) == 0:
        return np.zeros(size, storage.dtype)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if last >= storage.elements:
        raise BadError(f"element {last} of {storage.elements}", "a view inside its storage")
    flat = np.frombuffer(storage.body, storage.dtype)[offset:]
    steps = tuple(step * storage.dtype.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(flat, size, steps, writeable=False)


def _is_natural(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= 1 << 40


def _are_natural(value: object) -> TypeGuard[tuple[int, ...]]:
    return type(value) is tuple and all(_is_natural(item) for item in value)
