"""Objects of the API server as models."""

from __future__ import annotations

from expertmaps_operator.api.expertlane import ExpertLane
from expertmaps_operator.observe.parse import MapReader, custom, map_object, readable
from expertmaps_operator.snapshot import Invalid
from rowmap_jobs.formats import names
from tests.operator_edges.objects import DIGEST, lane, map_config_map, row_map


def test_a_whole_lane() -> None:
    parsed = custom(ExpertLane, lane())
    assert isinstance(parsed, ExpertLane)
    assert (parsed.metadata.name, parsed.metadata.generation) == ("lane-a", 1)
    assert parsed.spec.active_traffic_class == "agent"


def test_an_unreadable_spec_is_invalid_with_its_place() -> None:
    broken = custom(ExpertLane, lane(engine="SGLang"))
    assert isinstance(broken, Invalid)
    assert (broken.name, broken.generation) == ("lane-a", 1)
    assert broken.message.startswith("ExpertLane lane-a: spec.engine: found SGLang")
    assert isinstance(custom(ExpertLane, lane(newField=1)), Invalid)
    assert isinstance(custom(ExpertLane, {"metadata": {"name": "x"}}), Invalid)


def test_an_unreadable_status_is_empty() -> None:
    parsed = custom(ExpertLane, {**lane(), "status": {"replicas": "many"}})
    assert isinstance(parsed, ExpertLane)
    assert parsed.status.conditions == []
    assert parsed.status.replicas == 0


def test_fields_of_a_newer_status_are_ignored() -> None:
    parsed = custom(ExpertLane, {**lane(), "status": {"replicas": 2, "newer": {"x": 1}}})
    assert isinstance(parsed, ExpertLane)
    assert parsed.status.replicas == 2


def test_only_readable_ones_by_name() -> None:
    found = readable(ExpertLane, [lane("b"), lane("c", engine="x"), lane("a")])
    assert [item.metadata.name for item in found] == ["a", "b"]


def test_a_map_is_hashed_again() -> None:
    read = map_object(map_config_map())
    assert read is not None
    assert read.error is None
    assert read.row_map == row_map()
    assert read.digest == row_map().digest


def test_a_map_of_another_digest_is_told_and_not_used() -> None:
    read = map_object(map_config_map(digest=DIGEST))
    assert read is not None
    assert read.row_map is None
    assert read.error is not None
    assert "sha256" in read.error


def test_a_map_without_data_or_digest() -> None:
    empty = map_config_map()
    del empty["data"]
    read = map_object(empty)
    assert read is not None
    assert read.error is not None
    assert "data.rowmap.json" in read.error
    del empty["metadata"]["annotations"]
    assert map_object(empty) is None


def test_of_two_for_one_digest_the_one_with_our_name_counts() -> None:
    ours = map_config_map()
    copy = map_config_map()
    copy["metadata"]["name"] = "zz-copy"
    del copy["data"]
    reader = MapReader()
    for order in ([ours, copy], [copy, ours]):
        found = reader.by_digest("lane-a", order)
        assert [item.error for item in found.values()] == [None]


def test_a_version_is_parsed_once_and_a_new_one_again() -> None:
    manifest = map_config_map()
    manifest["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    reader = MapReader()
    first = reader.by_digest("lane-a", [manifest])
    again = reader.by_digest("lane-a", [manifest])
    digest = row_map().digest
    assert first[digest] is again[digest]
    manifest["metadata"] |= {"resourceVersion": "2"}
    manifest["data"] = {names.MAP_FILE: "{}"}
    assert reader.by_digest("lane-a", [manifest])[digest].error is not None
