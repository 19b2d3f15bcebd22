"""Flags of the process, each with an environment variable that it falls back to."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ENV_PREFIX = "EXPERTMAPS_OPERATOR_"

_NAMESPACE = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
_ACCOUNT = re.compile(r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")
_IMAGE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,1023}$")
_PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_FORMATS = ("json", "text")
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no", "")


class SettingsError(ValueError):
    """One line that names the flag, what was found and what was expected."""


@dataclass(frozen=True)
class Options:
    """The operator's own settings; what it asks of a lane is in the lane."""

    namespaces: tuple[str, ...]
    runner_image: str
    runner_service_account: str
    runner_pull_policy: str
    max_concurrent_profiles: int
    max_concurrent_rollouts: int
    paused: bool
    metrics_port: int
    log_format: str


def parse(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> Options:
    """Read and check the flags whole. Raises SettingsError; --help exits as argparse does."""
    given = _parser().parse_args(argv)

    def text(name: str, default: str = "") -> str:
        value = getattr(given, name)
        found = env.get(ENV_PREFIX + name.upper()) or default if value is None else value
        return str(found).strip()

    spaces = given.namespace or env.get(ENV_PREFIX + "NAMESPACE", "").split(",")
    namespaces = tuple(sorted({item.strip() for item in spaces if item.strip()}))
    if not namespaces:
        raise SettingsError("--namespace: found none, expected at least one namespace to watch")
    for namespace in namespaces:
        _matches("namespace", namespace, _NAMESPACE, "the name of a namespace")
    image = text("runner_image")
    _matches("runner_image", image, _IMAGE, "the image of the runner")
    account = text("runner_service_account", "expertmaps-runner")
    _matches("runner_service_account", account, _ACCOUNT, "the name of a ServiceAccount")
    return Options(
        namespaces=namespaces,
        runner_image=image,
        runner_service_account=account,
        runner_pull_policy=_choice(
            "runner_pull_policy", text("runner_pull_policy", "IfNotPresent"), _PULL_POLICIES
        ),
        max_concurrent_profiles=_number(
            "max_concurrent_profiles", text("max_concurrent_profiles", "1"), 0, 1000
        ),
        max_concurrent_rollouts=_number(
            "max_concurrent_rollouts", text("max_concurrent_rollouts", "1"), 0, 1000
        ),
        paused=_flag("paused", text("paused", "false")),
        metrics_port=_number("metrics_port", text("metrics_port", "8080"), 1, 65535),
        log_format=_choice("log_format", text("log_format", "json"), _FORMATS),
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise SettingsError(f"{message} (see --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="expertmaps-operator",
        allow_abbrev=False,
        description="Measures expert maps and rolls them out. Each flag falls back to "
        f"{ENV_PREFIX}<NAME>, such as {ENV_PREFIX}RUNNER_IMAGE.",
    )
    add = parser.add_argument
    add("--namespace", action="append", metavar="NAME", help="namespace to watch; repeat for more")
    add("--runner-image", metavar="IMAGE", help="image of the Jobs that measure and fetch maps")
    add(
        "--runner-service-account",
        metavar="NAME",
        help="ServiceAccount of those Jobs, unless a store names one (expertmaps-runner)",
    )
    add(
        "--runner-pull-policy",
        metavar="POLICY",
        help="Always, IfNotPresent or Never (IfNotPresent)",
    )
    add("--max-concurrent-profiles", metavar="N", help="profile Jobs at a time, all lanes (1)")
    add("--max-concurrent-rollouts", metavar="N", help="lanes rolling out at a time (1)")
    add(
        "--paused",
        nargs="?",
        const="true",
        metavar="true|false",
        help="look and report, but change nothing anywhere (false)",
    )
    add("--metrics-port", metavar="PORT", help="port of /metrics and /healthz (8080)")
    add("--log-format", metavar="FORMAT", help="json or text (json)")
    return parser


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def _matches(name: str, value: str, pattern: re.Pattern[str], expected: str) -> None:
    if not pattern.match(value):
        found = repr(value[:80]) if value else "nothing"
        raise SettingsError(f"{_spelled(name)}: found {found}, expected {expected}")


def _choice(name: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        expected = f"one of {', '.join(allowed)}"
        raise SettingsError(f"{_spelled(name)}: found {value[:80]!r}, expected {expected}")
    return value


def _number(name: str, value: str, low: int, high: int) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", value) or not low <= int(value) <= high:
        raise SettingsError(
            f"{_spelled(name)}: found {value[:80]!r}, expected a whole number from {low} to {high}"
        )
    return int(value)


def _flag(name: str, value: str) -> bool:
    lowered = value.lower()
    if lowered not in _TRUE + _FALSE:
        raise SettingsError(f"{_spelled(name)}: found {value[:80]!r}, expected true or false")
    return lowered in _TRUE
