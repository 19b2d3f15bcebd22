"""Flags and their environment."""

from __future__ import annotations

import pytest

from expertmaps_operator.settings import Options, SettingsError, parse

GOOD = ["--namespace", "lanes", "--runner-image", "registry/runner@sha256:" + "0" * 64]


def test_defaults() -> None:
    assert parse(GOOD, {}) == Options(
        namespaces=("lanes",),
        runner_image=GOOD[3],
        runner_service_account="expertmaps-runner",
        runner_pull_policy="IfNotPresent",
        max_concurrent_profiles=1,
        max_concurrent_rollouts=1,
        paused=False,
        metrics_port=8080,
        log_format="json",
    )


def test_flags_go_before_the_environment() -> None:
    env = {
        "EXPERTMAPS_OPERATOR_NAMESPACE": "from-env,b",
        "EXPERTMAPS_OPERATOR_RUNNER_IMAGE": "env-image",
        "EXPERTMAPS_OPERATOR_MAX_CONCURRENT_PROFILES": "3",
        "EXPERTMAPS_OPERATOR_PAUSED": "true",
        "EXPERTMAPS_OPERATOR_LOG_FORMAT": "",
    }
    from_env = parse([], env)
    assert from_env.namespaces == ("b", "from-env")
    assert (from_env.runner_image, from_env.max_concurrent_profiles) == ("env-image", 3)
    assert from_env.paused
    assert from_env.log_format == "json"
    both = parse([*GOOD, "--namespace", "a", "--paused", "false", "--log-format", "text"], env)
    assert both.namespaces == ("a", "lanes")
    assert (both.paused, both.log_format) == (False, "text")


def test_paused_needs_no_value() -> None:
    assert parse([*GOOD, "--paused"], {}).paused


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "--namespace: found none, expected at least one namespace to watch"),
        (["--namespace", "A_b"], "--namespace: found 'A_b', expected the name of a namespace"),
        (["--namespace", "a"], "--runner-image: found nothing, expected the image of the runner"),
        (
            [*GOOD, "--max-concurrent-rollouts", "-1"],
            "--max-concurrent-rollouts: found '-1', expected a whole number from 0 to 1000",
        ),
        (
            [*GOOD, "--metrics-port", "0"],
            "--metrics-port: found '0', expected a whole number from 1 to 65535",
        ),
        (
            [*GOOD, "--runner-pull-policy", "Sometimes"],
            "--runner-pull-policy: found 'Sometimes', expected one of Always, IfNotPresent, Never",
        ),
        ([*GOOD, "--paused", "maybe"], "--paused: found 'maybe', expected true or false"),
        ([*GOOD, "--nonsense"], "unrecognized arguments: --nonsense (see --help)"),
    ],
)
def test_refusals_are_one_line(argv: list[str], line: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse(argv, {})
    assert str(refused.value) == line
