"""torch zip files made by hand, opcode by opcode."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

FILES = Path(__file__).parent / "torch_files"


def genuine(name: str) -> bytes:
    return (FILES / f"{name}.pt").read_bytes()


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as packed:
        for name, body in members.items():
            packed.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), body, method)
    return out.getvalue()


def torch_zip(body: bytes, storages: dict[str, bytes] | None = None, **more: bytes) -> bytes:
    """`body` is what stands between the protocol and STOP."""
    members = {"x/data.pkl": b"\x80\x02" + body + b".", "x/byteorder": b"little"}
    members |= {f"x/data/{key}": value for key, value in (storages or {}).items()}
    return archive(members | {f"x/{name}": value for name, value in more.items()})


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    raw = value.to_bytes(8, "little", signed=True)
    return b"\x8a\x08" + raw


def numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(key: str, elements: int, kind: str = "LongStorage") -> bytes:
    words = text("storage") + b"ctorch\n" + kind.encode() + b"\n" + text(key) + text("cpu")
    return b"(" + words + number(elements) + b"tQ"


def tensor(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    elements: int,
    offset: int = 0,
    key: str = "0",
    kind: str = "LongStorage",
) -> bytes:
    args = storage(key, elements, kind) + number(offset) + numbers(size) + numbers(stride)
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + args + hooks + b"tR"


def keyed(key: str, value: bytes) -> bytes:
    """A dict of one key."""
    return b"}" + text(key) + value + b"s"
