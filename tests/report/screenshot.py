"""Picture of the sample report: `python -m tests.report.screenshot OUT [WIDTH [SCHEME [HEIGHT]]]`.

Writes an indexed PNG of the top of the page, HEIGHT pixels high (0: all of it), in its 255 most
frequent colours: a third of the size, and the eye sees no difference.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rowmap_jobs.report import png, render
from tests.report.browser import Page, running
from tests.report.sample import build

PIXELS = """(async () => {
  const image = new Image();
  image.src = 'data:image/png;base64,%s';
  await image.decode();
  const canvas = document.createElement('canvas');
  canvas.width = image.width;
  canvas.height = image.height;
  const pen = canvas.getContext('2d');
  pen.drawImage(image, 0, 0);
  const data = pen.getImageData(0, 0, image.width, image.height).data;
  let out = '';
  for (let i = 0; i < data.length; i += 8192) {
    out += String.fromCharCode(...data.subarray(i, i + 8192));
  }
  return btoa(out);
})()"""


def reduce(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Indexed PNG of uint8[height,width,4]; rare colours become the nearest frequent one."""
    flat = pixels[..., :3].astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
    colours, index, counts = np.unique(flat, return_inverse=True, return_counts=True)
    parts = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1)
    kept = np.argsort(-counts, kind="stable")[:255]
    near = np.empty(len(colours), dtype=np.uint8)
    for start in range(0, len(colours), 1024):
        far = ((parts[start : start + 1024, None] - parts[kept][None]) ** 2).sum(axis=2)
        near[start : start + 1024] = far.argmin(axis=1)
    palette = [(int(r), int(g), int(b)) for r, g, b in parts[kept]]
    indices = near[index.reshape(flat.shape)]
    return png.encode(indices, [*palette, (0, 0, 0)], clear=len(palette))


def take(out: Path, width: int = 1280, scheme: str = "light", height: int = 1940) -> None:
    report, plots = build()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "report.html"
        source.write_text(render(report, plots), encoding="utf-8")
        with running(Path(folder) / "profile") as browser:
            page, blank = Page(browser), Page(browser)
            page.look(width, scheme)
            page.open(source)
            whole = int(page.value("document.scrollingElement.scrollHeight"))
            size = (min(height or whole, whole), width, 4)
            picture = base64.b64encode(page.picture(width, size[0])).decode()
            raw = base64.b64decode(blank.value_of_promise(PIXELS % picture))
    out.write_bytes(reduce(np.frombuffer(raw, dtype=np.uint8).reshape(size)))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    words = sys.argv[1:]
    take(
        Path(words[0]),
        int(words[1]) if len(words) > 1 else 1280,
        words[2] if len(words) > 2 else "light",
        int(words[3]) if len(words) > 3 else 1940,
    )
