"""Speed of importing routed experts: CPU time against reading alone, and against a plain script.

    python tests/bench/bench_import.py [--bytes 64000000] [--repeats 5] [--forms npy.gz] [--memory]

Makes records of vLLM's routed experts (40 layers, 384 experts, top-6, uint16, as returned for one
sequence each: 600 to 1400 tokens) of `--bytes` in all, in the three ways in which they are kept:
a folder of .npy.gz files, a folder of .npy files and a JSONL file of responses. For each:
`read_s` reads (and decompresses with Python's zlib, or splits lines, decodes JSON and base64) and
does nothing else; `isal_read_s` decompresses as the importer does, with ISA-L;
`import_s` is the importer; `counter_s` is what one writes first, nested loops and a Counter, timed
on `--counter-bytes` of the same files and scaled. Best of `--repeats`, process CPU time, no file
in a cold cache. Prints JSON. 1 GB: `--bytes 1000000000`.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import io
import json
import resource
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from isal import isal_zlib

from rowmap_jobs.exchange import routed
from rowmap_jobs.exchange.base import Layout

LAYERS, EXPERTS, TOP_K = 40, 384, 6
LAYOUT = Layout(tuple(range(LAYERS)), (EXPERTS,) * LAYERS, (TOP_K,) * LAYERS)
FORMS = ("npy.gz", "npy", "jsonl")
OPTIONS = routed.Options(layout=LAYOUT)


def sequences(total: int, seed: int = 0) -> Iterator[tuple[np.ndarray, int]]:
    """Arrays [tokens - 1, 40, 6] of skewed routing, and the prompt's tokens, of `total` bytes.

    Each row is drawn for itself, by weight and without replacement; the weights are lognormal, so
    that the 295 hottest of 384 experts get some 98% of the choices, as in a published profile.
    """
    rng = np.random.default_rng(seed)
    weights = np.exp(rng.normal(0, 1.6, (LAYERS, EXPERTS)))
    chances = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)
    # A table of 4096 equal chances a layer: drawing is one look-up.
    ticks = (np.arange(4096) + 0.5) / 4096
    table = np.stack([np.searchsorted(row, ticks) for row in chances]).clip(0, EXPERTS - 1)
    table = table.astype(np.uint16)
    layer = np.arange(LAYERS)[:, None]
    made = 0
    while made < total:
        tokens = int(rng.integers(600, 1400))
        ids = table[layer, rng.integers(0, 4096, (tokens, LAYERS, TOP_K))]
        while True:
            ordered = np.sort(ids, axis=2)
            again = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
            if not again.any():
                break
            rows, layers = np.nonzero(again)
            ids[rows, layers] = table[layers[:, None], rng.integers(0, 4096, (len(rows), TOP_K))]
        made += ids.nbytes
        yield ids, tokens // 2


def make(folder: Path, total: int, forms: Sequence[str] = FORMS) -> dict[str, Path]:
    """The forms of the same records."""
    out = {name: folder / name for name in forms if name != "jsonl"}
    for path in out.values():
        path.mkdir()
    if "jsonl" in forms:
        out["jsonl"] = folder / "responses.jsonl"
    with (folder / "responses.jsonl").open("w") as responses:
        for number, (ids, prompt) in enumerate(sequences(total)):
            body = io.BytesIO()
            np.save(body, ids, allow_pickle=False)
            usage = {"prompt_tokens": prompt, "completion_tokens": len(ids) + 1 - prompt}
            for name in forms:
                if name == "jsonl":
                    continue
                packed = gzip.compress(body.getvalue(), 6) if name == "npy.gz" else body.getvalue()
                (out[name] / f"{number:06}.{name}").write_bytes(packed)
                (out[name] / f"{number:06}.json").write_text(json.dumps({"usage": usage}))
            if "jsonl" not in forms:
                continue
            text = base64.b64encode(body.getvalue()).decode()
            record = {"id": f"r{number}", "usage": usage, "choices": [{"routed_experts": text}]}
            responses.write(json.dumps(record) + "\n")
    return out


def read_npy(path: Path) -> None:
    for file in sorted(path.glob("*.npy")):
        with file.open("rb") as handle:
            while handle.read(1 << 20):
                pass


def read_npy_gz(library: Any, path: Path) -> None:
    """The faster way to decompress in steps: zlib itself, not the gzip module."""
    for file in sorted(path.glob("*.npy.gz")):
        stream = library.decompressobj(wbits=31)
        with file.open("rb") as handle:
            while data := handle.read(1 << 18):
                stream.decompress(data)


def read_jsonl(path: Path) -> None:
    with path.open("rb") as handle:
        for line in handle:
            base64.b64decode(json.loads(line)["choices"][0]["routed_experts"])


def counter_script(kind: str, path: Path, limit: int) -> int:
    """The script one writes first; gives the bytes of ids that it counted."""
    counts: dict[tuple[str, int], Counter[int]] = {}
    done = 0

    def count(array: np.ndarray, prompt: int) -> None:
        for row, token in enumerate(array):
            phase = "prefill" if row < prompt else "decode"
            for layer, experts in enumerate(token):
                counter = counts.setdefault((phase, layer), Counter())
                for expert in experts:
                    counter[int(expert)] += 1

    if kind == "jsonl":
        with path.open() as handle:
            for line in handle:
                record = json.loads(line)
                raw = base64.b64decode(record["choices"][0]["routed_experts"])
                array = np.load(io.BytesIO(raw))
                count(array, record["usage"]["prompt_tokens"])
                done += array.nbytes
                if done >= limit:
                    break
        return done
    for file in sorted(path.glob(f"*.{kind}")):
        raw = gzip.decompress(file.read_bytes()) if kind == "npy.gz" else file.read_bytes()
        array = np.load(io.BytesIO(raw))
        usage = json.loads((path / f"{file.name.split('.')[0]}.json").read_text())["usage"]
        count(array, usage["prompt_tokens"])
        done += array.nbytes
        if done >= limit:
            break
    return done


def best(repeats: int, work: Callable[[], object]) -> float:
    """Least process CPU seconds of `repeats` runs."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


READERS: dict[str, Callable[[Path], None]] = {
    "npy.gz": partial(read_npy_gz, zlib),
    "npy": read_npy,
    "jsonl": read_jsonl,
}


def measure(paths: dict[str, Path], total: int, repeats: int, counter_bytes: int) -> object:
    out = {}
    for kind, path in paths.items():
        read_s = best(repeats, partial(READERS[kind], path))
        import_s = best(repeats, partial(routed.read, path, OPTIONS))
        start = time.process_time()
        done = counter_script(kind, path, min(total, counter_bytes))
        counter_s = (time.process_time() - start) * total / done
        out[kind] = {
            "read_s": round(read_s, 3),
            "import_s": round(import_s, 3),
            "counter_s": round(counter_s, 1),
            "import_to_read": round(import_s / read_s, 2),
            "counter_to_import": round(counter_s / import_s, 1),
        }
        if kind == "npy.gz":
            isal_s = best(repeats, partial(read_npy_gz, isal_zlib, path))
            out[kind] |= {
                "isal_read_s": round(isal_s, 3),
                "import_to_isal_read": round(import_s / isal_s, 2),
            }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=64_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--counter-bytes", type=int, default=4_000_000)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--memory", action="store_true", help="import once each, peak memory only")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        paths = make(Path(name), given.bytes, given.forms)
        result: dict[str, object] = {"bytes": given.bytes, "layers": LAYERS, "experts": EXPERTS}
        if given.memory:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for path in paths.values():
                held = routed.read(path, OPTIONS)
                result["sequences"] = len(held.names)
                result["counts_mb"] = 2 * held.decode.nbytes >> 20
                del held
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            result |= {"rss_before_mb": before >> 10, "rss_peak_mb": after >> 10}
        else:
            result |= {
                "repeats": given.repeats,
                "forms": measure(paths, given.bytes, given.repeats, given.counter_bytes),
            }
        json.dump(result, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
