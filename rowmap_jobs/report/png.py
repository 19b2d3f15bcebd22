"""A small PNG encoder: 8-bit indexed colour, which is what a heatmap needs (RFC 2083). Pure."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Colour = tuple[int, int, int]
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_INDEXED = 3


def encode(pixels: npt.NDArray[np.uint8], palette: Sequence[Colour], clear: int) -> bytes:
    """PNG of `pixels` uint8[height,width], indices into `palette`; index `clear` is transparent.

    Raises ValueError when an index is beyond the palette or there is no pixel.
    """
    if pixels.ndim != 2 or not pixels.size:
        raise ValueError(f"pixels: found shape {pixels.shape}, expected height and width over 0")
    if not 0 <= clear < len(palette) <= 256 or int(pixels.max()) >= len(palette):
        raise ValueError(f"palette: found {len(palette)} colours, expected one for every index")
    height, width = pixels.shape
    # Every line begins with its filter; 0 is none, and none is best for indices.
    lines = np.zeros((height, width + 1), dtype=np.uint8)
    lines[:, 1:] = pixels
    header = struct.pack(">IIBBBBB", width, height, 8, _INDEXED, 0, 0, 0)
    alpha = bytes(0 if index == clear else 255 for index in range(clear + 1))
    return _SIGNATURE + b"".join(
        (
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", b"".join(bytes(colour) for colour in palette)),
            _chunk(b"tRNS", alpha),
            _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def data_url(image: bytes) -> str:
    """The image as a data: URL."""
    return "data:image/png;base64," + base64.b64encode(image).decode("ascii")


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
