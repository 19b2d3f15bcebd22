"""Will a pod find the compile and autotune caches of another one? Asked without loading weights.

    python -m expertmaps_hook_preflight LEFT.json RIGHT.json

Runs where a lane's pod runs: same image, mounts and device. Each file is a launch:
`{"command": ["vllm", "serve", ...], "env": {"NAME": "value", "GONE": null}}`; the environment is
that of this process with these changes, and without what only the other file names.
Prints one line of JSON:
`{"equal", "left": HASHES, "right": HASHES, "differs": [{"factor", "left", "right"}]}` with HASHES
`{"compile", "env", "config", "autotune", "caches"}`. Factors are `env.<NAME>`, `<part>.<field>` of
vLLM's configuration, `inductor.<option>` and `functorch.<option>` of torch, `cache.<name>` for a
folder or switch of a cache; `<part>` where no field says why, and `hash.<name>` where no part does.
Exit code 0: equal, 1: not, 2: no answer.

vLLM's own functions compute the hashes (compilation/caching.py: aot_compile_hash_factors). Where
caches lie is in none of them (envs.py: compile_factors), and is compared by `caches`. A boot
changes the configuration once more, so compare two preflights, never one with a folder's name.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import expertmaps_hook_autotune as autotune
    from .expertmaps_hook import OWNER_MARK
    from .expertmaps_hook_env import HookError
else:
    import expertmaps_hook_autotune as autotune
    from expertmaps_hook import OWNER_MARK
    from expertmaps_hook_env import HookError

ENTRIES = ("serve", "vllm.entrypoints.openai.api_server")
ANSWER = "EXPERTMAPS-PREFLIGHT "
TIMEOUT_SECONDS = 600
MAX_VALUE = 200
COMPILER_PARTS = ("inductor", "functorch")

Launch = Mapping[str, Any]
Part = tuple[str, Mapping[str, Any]]
"""The hash of one part of a launch, and the values that it is made from."""


def read_launch(path: Path) -> Launch:
    """A launch from its file. Raises HookError (LaunchInvalid)."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise HookError("LaunchInvalid", f"{path}: {type(error).__name__}: {error}") from None
    command = data.get("command") if isinstance(data, dict) else None
    if not isinstance(command, list) or not all(isinstance(item, str) for item in command):
        raise HookError("LaunchInvalid", f"{path}: command: expected a list of strings")
    env = data.get("env", {})
    if not isinstance(env, dict) or not all(
        value is None or isinstance(value, str) for value in env.values()
    ):
        raise HookError("LaunchInvalid", f"{path}: env: expected an object of strings or nulls")
    engine_arguments(command)
    return {"command": command, "env": env}


def engine_arguments(command: list[str]) -> list[str]:
    """What follows the name of vLLM's server in a command. Raises HookError (LaunchInvalid)."""
    for index, item in enumerate(command):
        if item in ENTRIES:
            return command[index + 1 :]
    raise HookError("LaunchInvalid", f"command: found no {' or '.join(ENTRIES)} in {command[:4]}")


def beside(launch: Launch, other: Launch) -> Launch:
    """A launch in which what only the other one sets is unset, rather than this process's own.

    A template that drops a variable of the pod it is compared in would else seem to keep it.
    """
    named = (name for name, value in other["env"].items() if value is not None)
    return {**launch, "env": {**dict.fromkeys(named), **launch["env"]}}


def environment(launch: Launch, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a launch; a failing hook in it has nothing to report here."""
    found = {**base, **{name: value for name, value in launch["env"].items() if value is not None}}
    for name, value in launch["env"].items():
        if value is None:
            found.pop(name, None)
    found[OWNER_MARK] = "preflight"
    return found


def ask(launch: Launch) -> dict[str, Any]:
    """Hashes and factors of a launch, from a process of its own. Raises HookError."""
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = environment(launch, os.environ)
    env["PYTHONPATH"] = os.pathsep.join(item for item in path if item)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "expertmaps_hook_preflight", "-"],
            input=json.dumps(engine_arguments(launch["command"])), env=env,
            capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HookError("PreflightFailed", f"{type(error).__name__}: {error}") from None
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER):
            found: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
            return found
    said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
    raise HookError("PreflightFailed", f"exit code {done.returncode}: {said}")


def compare(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """The answer for two launches: equal hashes, and each factor that differs, by name."""
    names = sorted(set(left["factors"]) | set(right["factors"]))
    pairs = [(name, left["factors"].get(name), right["factors"].get(name)) for name in names]
    differs = [
        {"factor": name, "left": a, "right": b}
        for name, a, b in pairs
        if a != b and _matters(name, left["parts"], right["parts"])
    ]
    named = {item["factor"].partition(".")[0] for item in differs}
    for part in sorted(set(left["parts"]) | set(right["parts"])):
        a, b = left["parts"].get(part), right["parts"].get(part)
        if a != b and part not in named:
            named.add(part)
            differs.append({"factor": part, "left": a, "right": b})
    for name in sorted(set(left["hashes"]) | set(right["hashes"])):
        a, b = left["hashes"].get(name), right["hashes"].get(name)
        if a != b and not named & _explaining(name, named):
            differs.append({"factor": f"hash.{name}", "left": a, "right": b})
    return {
        "equal": left["hashes"] == right["hashes"],
        "left": left["hashes"],
        "right": right["hashes"],
        "differs": differs,
    }


def _explaining(name: str, named: set[str]) -> set[str]:
    """Of the parts named, those that a hash is made from."""
    if name in ("env", "caches"):
        return {"cache" if name == "caches" else name}
    if name == "compile":
        return named - {"cache"}
    return named - {"cache", "env", *COMPILER_PARTS}


def _matters(name: str, left: Mapping[str, str], right: Mapping[str, str]) -> bool:
    """Whether the part of vLLM's configuration that a factor belongs to has another hash."""
    part = name.partition(".")[0]
    return left.get(part) != right.get(part)


def factors(arguments: list[str]) -> dict[str, Any]:
    """What this process's environment and the arguments come to: hashes, parts and factors.

    A compiled graph is found by environment, configuration and the compiler's options: vLLM hashes
    these options with the rest for its one artifact of a whole model, and on their own for the
    graphs below any other (compilation/backends.py).
    """
    from types import SimpleNamespace

    from vllm import envs
    from vllm.compilation.caching import aot_compile_hash_factors
    from vllm.config.utils import hash_factors
    from vllm.model_executor.warmup.flashinfer_autotune_cache import flashinfer_autotune_cache_hash

    config = engine_config(arguments)
    environ = envs.compile_factors()
    env_hash, config_hash, *_ = aot_compile_hash_factors(config)
    parts = {"env": hash_factors(environ)}
    named: dict[str, str] = {f"env.{name}": shown(value) for name, value in environ.items()}
    told = {**config_parts(config), **compiler_parts(), "cache": caches(config)}
    for part, (digest, values) in told.items():
        parts[part] = digest
        named |= {f"{part}.{name}": shown(value) for name, value in values.items()}
    compiled = [env_hash, config_hash, *(parts[part] for part in COMPILER_PARTS)]
    hashes = {
        "compile": _digest(compiled),
        "env": env_hash,
        "config": config_hash,
        "autotune": flashinfer_autotune_cache_hash(SimpleNamespace(vllm_config=config)),
        "caches": parts["cache"],
    }
    return {"hashes": hashes, "parts": parts, "factors": named}


def config_parts(config: Any) -> dict[str, Part]:
    """Each part of vLLM's configuration that its hash reads, by the part's name."""
    parts = {name: getattr(config, name) for name in hashed_fields(config)}
    if getattr(config.compilation_config, "compile_mm_encoder", False):
        # Hashed by the whole configuration, and by no part of it (config/vllm.py).
        parts["multimodal_config"] = getattr(config.model_config, "multimodal_config", None)
    found: dict[str, Part] = {}
    for name, part in parts.items():
        if part is None:
            continue
        if not callable(getattr(part, "compute_hash", None)):
            found[name] = _digest(part), part if isinstance(part, dict) else {}
            continue
        fields = hashed_fields(part) if dataclasses.is_dataclass(part) else []
        found[name] = str(part.compute_hash()), {key: getattr(part, key, None) for key in fields}
    return found


def compiler_parts() -> dict[str, Part]:
    """The options of torch's compiler, as vLLM reads them for its hashes."""
    from vllm.compilation.compiler_interface import get_inductor_factors

    system, torch_key, inductor, functorch = get_inductor_factors()
    options = {**inductor, "system": system, "torch": _digest(torch_key)}
    return {
        "inductor": (_digest([system, torch_key, inductor]), options),
        "functorch": (_digest(functorch), functorch),
    }


def caches(config: Any) -> Part:
    """Where this process would look for what was compiled or tuned, and what it would not look for.

    Folders by the rules of their owners, links followed. Below vLLM's root unless said otherwise:
    graphs (compilation/backends.py), DeepGEMM's kernels (utils/deep_gemm.py), FlashInfer's tactics.
    """
    from torch._inductor import config as inductor
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from vllm import envs
    from vllm.compilation.compiler_interface import is_compile_cache_enabled

    environ, compilation, root = os.environ, config.compilation_config, Path(envs.VLLM_CACHE_ROOT)
    triton = Path(environ.get("TRITON_HOME", os.path.expanduser("~"))) / ".triton" / "cache"  # noqa: PTH111
    folders = {
        "vllm": root,
        "compile": compilation.cache_dir or root / "torch_compile_cache",
        "inductor": environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()),
        "triton": environ.get("TRITON_CACHE_DIR", triton),
        "deep_gemm": environ.get("DG_JIT_CACHE_DIR") or root / "deep_gemm",
        "autotune": autotune.root(environ),
    }
    with contextlib.suppress(Exception):  # not installed, or not for this machine
        workspace = importlib.import_module("flashinfer.jit.env").FLASHINFER_WORKSPACE_DIR
        folders["flashinfer"] = workspace
        folders["autotune"] = autotune.device_folder(autotune.root(environ), environ, workspace)
    found: dict[str, Any] = {name: os.path.realpath(folder) for name, folder in folders.items()}
    found["compile_enabled"] = bool(is_compile_cache_enabled(compilation.inductor_compile_config))
    found["inductor_graphs"] = inductor.fx_graph_cache
    found["inductor_autotune"] = inductor.autotune_local_cache
    skips = envs.VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS  # none said: vLLM's own; an empty list: none
    found["autotune_skips"] = None if skips is None else sorted(skips)
    return _digest(found), found


def engine_config(arguments: list[str]) -> Any:
    """vLLM's configuration for the arguments of its server, no weights read."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    if getattr(parsed, "model_tag", None):
        parsed.model = parsed.model_tag
    return AsyncEngineArgs.from_cli_args(parsed).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER
    )


def hashed_fields(part: Any) -> list[str]:
    """Fields of a part of the configuration that its hash depends on, found by changing each."""
    before, found = part.compute_hash(), []
    for field in dataclasses.fields(part):
        changed = copy.copy(part)
        object.__setattr__(changed, field.name, "changed by expertmaps preflight")
        try:
            after = changed.compute_hash()
        except Exception:  # the hash reads it, and cannot make anything of this value
            after = None
        if after != before:
            found.append(field.name)
    return found


def _digest(value: Any) -> str:
    """sha256 of a value's text: the same in each process for what the parts hold."""
    with contextlib.suppress(TypeError, ValueError):
        value = json.dumps(value, sort_keys=True, default=_plain)
    return hashlib.sha256(str(value).encode()).hexdigest()


def shown(value: Any) -> str:
    """A value on one line; a long one by its beginning and its hash."""
    with contextlib.suppress(TypeError, ValueError):
        value = json.dumps(value, sort_keys=True, default=_plain)
    text = str(value)
    if len(text) <= MAX_VALUE:
        return text
    return f"{text[:80]}... sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _plain(value: Any) -> Any:
    """For json: sets in order, dataclasses by field, anything else by its type and name."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    text = str(value)
    return text if " at 0x" not in text else type(value).__qualname__


def main(arguments: list[str]) -> int:
    """The command; `-` answers for the launch on standard input, as `ask` asks it."""
    if arguments == ["-"]:
        found = factors(json.load(sys.stdin))
        sys.stdout.write(f"\n{ANSWER}{json.dumps(found)}\n")
        return 0
    if arguments in (["-h"], ["--help"]):
        sys.stdout.write(__doc__ or "")
        return 0
    try:
        if len(arguments) != 2:
            raise HookError("LaunchInvalid", f"found {len(arguments)} files, expected 2")
        one, two = (read_launch(Path(name)) for name in arguments)
        left, right = ask(beside(one, two)), ask(beside(two, one))
    except HookError as failure:
        sys.stderr.write(f"{failure}\n")
        return 2
    answer = compare(left, right)
    sys.stdout.write(json.dumps(answer, sort_keys=True) + "\n")
    return 0 if answer["equal"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
