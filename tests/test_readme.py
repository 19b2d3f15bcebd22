"""The README says what to do for every reason that is no success, and names real things."""

from __future__ import annotations

import re
from pathlib import Path

from expertmaps_operator.api.reasons import Reason
from expertmaps_operator.metrics import Metrics
from rowmap_jobs.cli.commands import COMMANDS
from rowmap_jobs.reasons import Reason as RunReason

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FINE = {
    *("MapAccepted", "ProfileRunning", "ProfileSucceeded", "WriteVerified", "RolloutStarted"),
    *("Canary", "Rolling", "RolloutComplete", "LaneServing", "Idle"),
    *("AllPodsReportDigest", "CompileCacheHit", "NotPaused", "Paused"),
    "NotRolledBack",
    *("TranscriptsFound", "ProfileStarted", "TrafficClassSwitched"),
    *("MeasuredRecently", "TemplateRestored"),
    *("Accepted", "Probed", "Fetched"),
}


def test_every_reason_to_act_on_is_explained() -> None:
    reasons = {str(reason) for reason in (*Reason, *RunReason)} - FINE
    assert {reason for reason in reasons if f"`{reason}`" not in README} == set()


def test_every_reason_of_the_operator_is_used_by_its_code() -> None:
    code = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "operator/expertmaps_operator").rglob("*.py")
        if path.name != "reasons.py"
    )
    assert {r.name for r in Reason if f"Reason.{r.name}" not in code} == set()


def test_every_variable_of_the_hook_is_explained() -> None:
    code = (ROOT / "rowmap_jobs/hook/expertmaps_hook_env.py").read_text(encoding="utf-8")
    names = set(re.findall(r'"(EXPERTMAPS_[A-Z_]+)"', code))
    assert "EXPERTMAPS_CAPTURE_SLOTS" in names
    assert {
        name for name in names if f"| `{name}`" not in README and f", `{name}` |" not in README
    } == set()


def test_every_metric_of_the_operator_is_explained() -> None:
    standard = ("process_", "python_")
    metrics = [m for m in Metrics().registry.collect() if not m.name.startswith(standard)]
    names = {m.name + "_total" * (m.type == "counter") for m in metrics}
    assert "expertmaps_rollouts_total" in names
    assert {name for name in names if f"`{name}`" not in README} == set()


def test_every_command_of_rowmap_is_named() -> None:
    assert {each.name for each in COMMANDS if f"`{each.name}`" not in README} == set()


def test_commands_and_paths_of_the_readme_exist() -> None:
    targets = set(re.findall(r"(?:`|# )make ([a-z0-9-]+)", README))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {t for t in targets if not re.search(rf"^{t}:", makefile, re.M)} == set()
    for path in re.findall(r"`((?:crds|charts|operator|rowmap_jobs|tests)/[\w./-]*)`", README):
        assert (ROOT / path).exists(), path
    assert "@@" not in README
