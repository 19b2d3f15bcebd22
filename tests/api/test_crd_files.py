"""The CRD files are those of the models, and keep the rules of structural schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from expertmaps_operator.api import crd, crd_rules
from tests.api.conftest import CRDS, PLURALS

KINDS = {kind.plural: kind for kind in crd.KINDS}


def _schema(plural: str) -> dict[str, Any]:
    document = yaml.safe_load((CRDS / f"{plural}.yaml").read_text(encoding="utf-8"))
    (version,) = document["spec"]["versions"]
    return dict(version["schema"]["openAPIV3Schema"])


def _nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from _nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from _nodes(node[key], f"{path}[]")


def test_the_files_are_those_of_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main(["--check", str(CRDS)]) == 0, capsys.readouterr().out + "run: make crds"
    assert sorted(KINDS) == sorted(PLURALS)
    assert {one.stem for one in CRDS.glob("*.yaml")} == set(KINDS)


def test_a_stale_file_is_named(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main([str(tmp_path)]) == 0
    (tmp_path / "expertmaps.yaml").write_text("kind: Other\n")
    capsys.readouterr()
    assert crd.main(["--check", str(tmp_path)]) == 1
    assert "expertmaps.yaml differs from the models" in capsys.readouterr().out
    assert (tmp_path / "expertmaps.yaml").read_text() == "kind: Other\n"


@pytest.mark.parametrize("plural", PLURALS)
def test_every_field_is_described(plural: str) -> None:
    for path, node in _nodes(_schema(plural)):
        if path == ".metadata" or path.endswith("[]"):
            continue
        text = node.get("description", "")
        assert text.endswith("."), f"{path}: {text!r}"
        assert len(text.split()) > 1, f"{path}: {text!r}"


@pytest.mark.parametrize("plural", PLURALS)
def test_only_what_a_structural_schema_knows(plural: str) -> None:
    for path, node in _nodes(_schema(plural)):
        assert "type" in node, path
        assert not {"$ref", "anyOf", "allOf", "oneOf", "const", "title", "nullable"} & set(node), (
            path
        )
        assert node.get("additionalProperties") is not False, path
        assert node["type"] != "number", f"{path}: floats do not survive every client"
        if node["type"] == "integer":
            assert node["format"] in ("int32", "int64"), path


@pytest.mark.parametrize("plural", PLURALS)
def test_specs_are_bounded_and_statuses_have_no_defaults(plural: str) -> None:
    for path, node in _nodes(_schema(plural)):
        if node["type"] == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        if path.startswith(".spec"):
            if node["type"] == "string":
                assert "maxLength" in node or "enum" in node, path
            if node["type"] == "integer":
                assert {"minimum", "maximum"} <= set(node), path
        if path.startswith(".status"):
            assert "default" not in node, path


@pytest.mark.parametrize("plural", PLURALS)
def test_conditions_are_a_map_by_type(plural: str) -> None:
    conditions = _schema(plural)["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_every_rule_is_used() -> None:
    used = set()
    for plural in PLURALS:
        for _, node in _nodes(_schema(plural)):
            used |= {rule["message"] for rule in node.get("x-kubernetes-validations", [])}
    tables = (crd_rules.ROOT_RULES, crd_rules.MODEL_RULES, crd_rules.FIELD_RULES)
    rules = {rule["message"] for table in tables for rules in table.values() for rule in rules}
    assert used == rules | set(crd_rules.PATTERN_MESSAGES.values())


@pytest.mark.parametrize("plural", PLURALS)
def test_columns(plural: str) -> None:
    columns = crd.crd(KINDS[plural])["spec"]["versions"][0]["additionalPrinterColumns"]
    assert columns[-1]["name"] == "Age"
    narrow = [column["name"] for column in columns if not column.get("priority")]
    assert narrow[narrow.index("Ready") + 1] == "Reason"
    fields = {path for path, _ in _nodes(_schema(plural))}
    for column in columns[:-1]:
        assert column["jsonPath"].split("[")[0] in fields, column
