"""What can be said of the chart's files without helm."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import jsonschema
import pytest
import yaml

from tests.chart.helm import CHART, ROOT

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def test_the_definitions_are_copies() -> None:
    ours = {one.name: one.read_bytes() for one in (CHART / "files/crds").iterdir()}
    made = {one.name: one.read_bytes() for one in (ROOT / "crds").glob("*.yaml")}
    assert ours == made, "run: make crds"
    # The template sets the keep policy after this line.
    assert all(text.count(b"\nmetadata:\n") == 1 for text in made.values())


def test_the_version_is_the_packages() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]


def _closed(schema: dict[str, Any], values: Any, path: str = "") -> None:
    for name, value in values.items():
        assert name in schema["properties"], f"{path}.{name} is not in the schema"
        child = schema["properties"][name]
        if "properties" in child:
            assert child["additionalProperties"] is False, f"{path}.{name}"
            _closed(child, value, f"{path}.{name}")
    missing = set(schema["properties"]) - set(values) - {"global"}
    assert not missing, f"{path}: not in values.yaml: {missing}"


def test_the_schema_has_every_value_and_no_other() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)
    assert SCHEMA["additionalProperties"] is False
    _closed(SCHEMA, VALUES)


@pytest.mark.parametrize(
    "values",
    [
        {"watchNamespace": ["a"]},
        {"watchNamespaces": ["A"]},
        {"image": {"operator": {"repo": "x"}}},
        {"image": {"runner": {"pullPolicy": "Sometimes"}}},
        {"image": {"runner": {"digest": "sha256:12"}}},
        {"operator": {"maxConcurrentProfiles": "1"}},
        {"operator": {"logFormat": "xml"}},
        {"crds": {"install": "false"}},
        {"metrics": {"port": 0}},
    ],
)
def test_a_wrong_value_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, SCHEMA)


def test_images_name_no_other_registry() -> None:
    for file in [*CHART.rglob("*.yaml"), *(ROOT / "crds").rglob("*.yaml")]:
        found = re.findall(r"(?:repository|image): *([^\s{]+)", file.read_text())
        assert all(one.startswith("docker.io/") for one in found), (file, found)
