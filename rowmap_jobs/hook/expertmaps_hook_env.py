"""What every module of the hook needs: settings, the named failure, and the hook's own digest.

Standard library only: this is imported in every process of the engine, before torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SUPPORTED_ENGINE = "0.32.0"
DEFAULT_DIR = "/var/run/expertmaps"
DEFAULT_MAP = "/etc/expertmaps/rowmap.json"
MODES = ("off", "serve", "count")
TIERS = ("overlay", "mlock")
DEVICE_GUARD = 8 << 30
HOST_GUARD = 10 << 30
MAX_GUARD = 1 << 50
MAX_MESSAGE = 1024

CPU_BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")
"""With any of these, as vLLM starts CPU workers, OpenMP binds the main thread to one CPU."""

# Below the logger that vLLM configures, so that records reach the engine's log.
logger = logging.getLogger("vllm.expertmaps")


class HookError(Exception):
    """Why the hook does nothing: a CamelCase reason and a sentence."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        self.message = " ".join(message.split())[:MAX_MESSAGE]
        super().__init__(f"{reason}: {self.message}")


def as_failure(error: BaseException, reason: str = "HookFailed") -> HookError:
    """Any exception as a named failure."""
    if isinstance(error, HookError):
        return error
    return HookError(reason, f"{type(error).__name__}: {error}")


def cpus() -> set[int]:
    """CPUs for threads of the hook.

    A thread inherits the CPU that OpenMP bound its parent to, where it would keep the engine's
    other threads waiting; the process that started this one is not bound.
    """
    own = os.sched_getaffinity(0)
    if len(own) == 1 and any(name in os.environ for name in CPU_BINDINGS):
        with suppress(OSError):
            return own | os.sched_getaffinity(os.getppid())
    return own


def leave_bound_cpu() -> None:
    """Called first in each thread of the hook."""
    with suppress(OSError):
        os.sched_setaffinity(0, cpus())


@dataclass(frozen=True)
class Settings:
    """The EXPERTMAPS_* environment."""

    mode: str = "off"
    map_path: Path = Path(DEFAULT_MAP)
    directory: Path = Path(DEFAULT_DIR)
    cold_directory: Path = Path(DEFAULT_DIR)
    tier: str = "overlay"
    status_port: int | None = None
    capture_slots: int = 64
    device_guard: int = DEVICE_GUARD
    host_guard: int = HOST_GUARD
    """Bytes that moving rows must leave free on the device and in host memory."""
    problem: HookError | None = None
    """A setting that could not be used; the hook then reports it and stays away."""


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Settings from an environment; an unusable value is recorded in `problem`, never raised."""
    problems: list[str] = []
    mode = environ.get("EXPERTMAPS_MODE") or "off"
    if mode not in MODES:
        problems.append(f"EXPERTMAPS_MODE: found {mode!r}, expected one of {', '.join(MODES)}")
        mode = "off"
    tier = environ.get("EXPERTMAPS_TIER") or "overlay"
    if tier not in TIERS:
        problems.append(f"EXPERTMAPS_TIER: found {tier!r}, expected one of {', '.join(TIERS)}")
        tier = "overlay"
    port = _integer(environ, "EXPERTMAPS_STATUS_PORT", 1, 65535, problems)
    slots = _integer(environ, "EXPERTMAPS_CAPTURE_SLOTS", 1, 4096, problems)
    device_guard = _integer(environ, "EXPERTMAPS_DEVICE_GUARD_BYTES", 0, MAX_GUARD, problems)
    host_guard = _integer(environ, "EXPERTMAPS_HOST_GUARD_BYTES", 0, MAX_GUARD, problems)
    directory = environ.get("EXPERTMAPS_DIR") or DEFAULT_DIR
    return Settings(
        mode=mode,
        map_path=Path(environ.get("EXPERTMAPS_MAP") or DEFAULT_MAP),
        directory=Path(directory),
        cold_directory=Path(environ.get("EXPERTMAPS_COLD_DIR") or directory),
        tier=tier,
        status_port=port,
        capture_slots=slots or Settings.capture_slots,
        device_guard=DEVICE_GUARD if device_guard is None else device_guard,
        host_guard=HOST_GUARD if host_guard is None else host_guard,
        problem=HookError("SettingInvalid", "; ".join(problems)) if problems else None,
    )


def _integer(
    environ: Mapping[str, str], name: str, low: int, high: int, problems: list[str]
) -> int | None:
    text = environ.get(name) or ""
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,16}", text) or not low <= int(text) <= high:
        problems.append(f"{name}: found {text[:32]!r}, expected an integer from {low} to {high}")
        return None
    return int(text)


def settings() -> Settings:
    """Settings of this process."""
    return read_settings(os.environ)


def engine_version() -> str:
    """Version of the vLLM that is already imported in this process."""
    module = sys.modules.get("vllm")
    found = getattr(module, "__version__", None)
    if isinstance(found, str):
        return found
    from vllm.version import __version__

    return str(__version__)


def check_engine(version: str) -> None:
    """Refuse an engine for which the seams were not checked. Raises HookError."""
    if version.split("+", 1)[0] != SUPPORTED_ENGINE:
        raise HookError(
            "HookUnsupported", f"vLLM: found {version}, expected {SUPPORTED_ENGINE} for this hook"
        )


def mounted_files(folder: Path) -> dict[str, bytes]:
    """The hook's files by their ConfigMap key, as they lie in `folder`."""
    found = {path.name: path.read_bytes() for path in folder.glob("expertmaps_hook*.py")}
    for info in sorted(folder.glob("expertmaps_hook-*.dist-info")):
        for name in ("entry_points.txt", "METADATA"):
            if (info / name).is_file():
                found[name] = (info / name).read_bytes()
    return found


def digest_of(files: Mapping[str, bytes]) -> str:
    """`sha256:<hex>` over the sorted lines `<name>NUL<sha256 of the file>`."""
    lines = "".join(
        f"{name}\0{hashlib.sha256(data).hexdigest()}\n" for name, data in sorted(files.items())
    )
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def hook_digest() -> str:
    """Digest of the files this hook was loaded from."""
    return digest_of(mounted_files(Path(__file__).parent))


def process_start() -> float:
    """Unix time at which this process started."""
    fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    ticks = int(fields[19])
    for line in Path("/proc/stat").read_text("ascii").splitlines():
        if line.startswith("btime "):
            return int(line.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    raise OSError("btime not found in /proc/stat")
