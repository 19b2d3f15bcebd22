"""A whole profile against a real S3 server and a stand-in engine."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rowmap_jobs import profile, store
from rowmap_jobs.formats import census, names, rowmap
from rowmap_jobs.formats.base import sha256_digest
from rowmap_jobs.formats.report import Report
from rowmap_jobs.formats.run import Verdict
from rowmap_jobs.reasons import RunError
from tests.jobs.fake_engine import EXPERTS, LAYERS, TOP_K, count, encode
from tests.jobs.world import World, chat, with_ids


def fed(record: dict[str, Any], world: World) -> tuple[list[int], int]:
    """What real decode would have fed for a record, and where the response begins."""
    prompt = world.engine.render({"messages": record["request"]["messages"]})
    choice = record["response"]["choices"][0]
    answer = encode(choice["message"]["content"])
    ids = answer if choice["finish_reason"] == "stop" else answer[:-1]
    return prompt + ids, len(prompt)


def truth(records: list[dict[str, Any]], world: World) -> np.ndarray:
    """Decode counts int64[L,E] of a real decode of the records."""
    total = np.zeros((len(LAYERS), EXPERTS), dtype=np.int64)
    for record in records:
        tokens, start = fed(record, world)
        mask = np.arange(len(tokens)) >= start
        counts, _ = count(tokens, mask, np.ones(len(tokens), dtype=bool))
        total += counts[1]
    return total


def run(world: World, **over: Any) -> Verdict:
    return profile.run(world.spec(**over), world.services())


def read_census(world: World, verdict: Verdict) -> census.Census:
    assert verdict.census_digest is not None
    raw = world.get(names.census_key(world.store, verdict.census_digest))
    assert sha256_digest(raw) == verdict.census_digest
    return census.parse(raw, "census")


def read_report(world: World, verdict: Verdict) -> Report:
    assert verdict.report_key is not None
    return Report.from_bytes(world.get(verdict.report_key), "report")


def test_an_accepted_map_is_stored_and_made_into_a_config_map(world: World) -> None:
    records = [chat(i, finish="stop" if i % 2 else "length") for i in range(12)]
    world.record(records[:6])
    world.record(records[6:], "b.jsonl.gz")
    verdict = run(world)
    assert (verdict.outcome, verdict.reason) == ("Accepted", "Accepted")
    assert verdict.digest is not None and verdict.cold is not None and verdict.counted is not None
    # L1 between forced counting and a real decode is 0.
    data = read_census(world, verdict)
    assert (data.decode() == truth(records, world)).all()
    assert verdict.counted.fidelity == {"rendered": 12}
    assert verdict.counted.decode_tokens == int(truth(records, world)[0].sum()) // TOP_K
    # The map is the one the counts give, in the store and in the ConfigMap.
    raw = world.get(names.map_key(world.store, verdict.digest))
    rows = rowmap.parse(raw, "map", verdict.digest)
    order = np.argsort(-data.decode()[0], kind="stable").tolist()
    assert list(rows.layers["1"].hot) == order[:8]
    assert list(rows.layers["1"].cold) == order[8:][::-1]
    made = world.created[0]
    assert made["data"]["rowmap.json"].encode() == raw
    assert made["metadata"]["name"] == verdict.config_map
    assert made["metadata"]["labels"][names.LABEL_CLASS] == "agent"
    report = read_report(world, verdict)
    assert report.digest == verdict.digest and report.verdict == "provisional"
    assert report.trick_check is not None and report.trick_check["moved"] == 0
    assert report.off_policy is not None and report.off_policy.mean_logprob == -0.5
    page = world.get(verdict.report_key.replace(".json", ".html"))  # type: ignore[union-attr]
    assert b"provisional" in page and b"http:" not in page and b"<image" in page


def test_every_forced_request_has_what_the_method_asks_for(world: World) -> None:
    world.record([chat(i) for i in range(4)])
    run(world)
    forced = world.engine.forced()
    assert len({b["cache_salt"] for b in world.engine.posts("/v1/completions")}) == len(
        world.engine.posts("/v1/completions")
    )
    for body in forced:
        assert body["max_tokens"] == 1 and body["temperature"] == 0 and body["ignore_eos"] is True
        assert body["add_special_tokens"] is False
        assert 1 <= len(body["vllm_xargs"]["expertmaps_t"]) <= 64


def test_the_same_traffic_gives_the_same_artifacts(world: World) -> None:
    world.record([chat(i) for i in range(5)])
    first, second = run(world), run(world, run="lane.agent-2")
    assert first.digest == second.digest and first.census_digest == second.census_digest
    assert len(world.keys("store/maps/")) == 1


def test_recorded_ids_are_used_only_for_the_lanes_own_tokenizer(world: World) -> None:
    own = [with_ids(chat(i), world.engine) for i in range(3)]
    foreign = {**with_ids(chat(9), world.engine), "tokenizer": "sha256:" + "0" * 64}
    world.record([*own, foreign])
    verdict = run(world)
    assert verdict.counted is not None
    assert verdict.counted.fidelity == {"rendered": 1, "tokens": 3}
    assert (read_census(world, verdict).decode() == truth([*own, foreign], world)).all()


def test_turns_that_extend_each_other_are_sent_once(world: World) -> None:
    first = chat(1, session="s", created="2026-11-20T10:00:00Z")
    said = [*first["request"]["messages"], first["response"]["choices"][0]["message"]]
    second = chat(2, session="s", history=said, created="2026-11-20T10:05:00Z")
    lone = chat(3)
    world.record([second, first, lone])
    verdict = run(world)
    assert verdict.counted is not None
    assert (verdict.counted.sessions, verdict.counted.transcripts) == (2, 3)
    segments = sorted(len(b["vllm_xargs"]["expertmaps_seg"]) for b in world.engine.forced()[:2])
    assert segments == [2, 4]
    assert (read_census(world, verdict).decode() == truth([first, second, lone], world)).all()


def test_lost_rows_are_counted_once_more(world: World) -> None:
    records = [chat(i) for i in range(4)]
    world.record(records)
    world.engine.faults.lose_rows = 1
    verdict = run(world, replay={"concurrency": 1})
    assert (read_census(world, verdict).decode() == truth(records, world)).all()
    assert verdict.counted is not None and "RowsLost" not in verdict.counted.skipped


@pytest.mark.parametrize(
    ("fault", "value", "word"),
    [
        ("lose_rows", 2, "RowsLost"),
        ("bad_rows", 2, "BadRows"),
        ("damaged", 2, "CountsDamaged"),
        ("placeholder", 2, "ExpertsRepeated"),
        ("skip", ["NoSlot", "Preempted"], "Preempted"),
    ],
)
def test_a_sequence_that_fails_twice_is_dropped_and_counted(
    world: World, fault: str, value: Any, word: str
) -> None:
    world.record([chat(i) for i in range(4)])
    setattr(world.engine.faults, fault, value)
    verdict = run(world, replay={"concurrency": 1})
    assert verdict.counted is not None
    assert verdict.counted.skipped == {word: 1}
    assert verdict.counted.transcripts == 3


def test_a_hook_that_writes_nothing_ends_the_run(world: World) -> None:
    world.record([chat(i) for i in range(6)])
    world.engine.faults.silent = 1000
    with pytest.raises(RunError) as refused:
        run(world)
    assert refused.value.reason == "CountingFailed" and refused.value.final
    assert "found no counts of" in refused.value.message


def test_what_cannot_be_counted_is_left_out_by_name(world: World) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    seen = chat(10)
    seen["request"]["messages"][0]["content"] = [{"type": "text", "text": "look"}, image]
    several = chat(11)
    several["request"]["n"] = 2
    long = chat(12, size=900)
    silent = chat(13, size=0)
    world.engine.max_model_len = 600
    world.record([chat(1), chat(2), seen, several, long, silent, b'{"v":1}', chat(1)])
    verdict = run(world)
    assert verdict.counted is not None
    assert verdict.counted.skipped == {
        "Broken": 1,
        "Duplicate": 1,
        "EmptyResponse": 1,
        "Multimodal": 1,
        "SeveralChoices": 1,
        "TooLong": 1,
    }
    assert all(len(b["prompt"]) < 600 for b in world.engine.forced())


def test_a_record_without_response_is_generated_and_then_counted(world: World) -> None:
    open_ended = chat(1, response=None)
    world.record([open_ended, chat(2), chat(3)])
    verdict = run(world)
    assert verdict.counted is not None
    assert verdict.counted.fidelity == {"generated": 1, "rendered": 2}


def test_a_rewriting_template_is_refused_and_named(world: World) -> None:
    world.engine.faults.empty_think = True
    world.record([chat(i) for i in range(3)])
    verdict = run(world)
    report = read_report(world, verdict)
    assert report.rendering_refused == {"TextChanged": 3}
    assert report.counted.fidelity == {"generated": 3}
    assert any("decoded afresh" in note for note in report.notes)


def test_a_rejected_map_is_stored_but_not_given_to_the_lane(world: World) -> None:
    world.record([chat(i) for i in range(4)])
    verdict = run(world, acceptance={"minDecodeTokens": 100000})
    assert (verdict.outcome, verdict.reason) == ("Rejected", "TooFewDecodeTokens")
    assert world.created == [] and verdict.config_map is None
    assert world.keys("store/maps/")
    assert not read_report(world, verdict).accepted


def test_another_geometry_is_refused_before_anything_is_counted(world: World) -> None:
    world.record([chat(i) for i in range(3)])
    frozen = {
        "experts": EXPERTS,
        "topK": TOP_K,
        "hotRows": 9,
        "moeLayers": list(LAYERS),
        "rowBytes": 1000,
    }
    with pytest.raises(RunError) as refused:
        run(world, frozenGeometry=frozen)
    assert refused.value.reason == "GeometryMismatch"
    assert "hotRows: found 8, expected 9" in refused.value.message
    assert world.engine.forced() == []


def test_other_classes_maps_are_compared_and_damaged_ones_noted(world: World) -> None:
    world.record([chat(i) for i in range(4)])
    digest = run(world).digest
    assert digest is not None
    missing, damaged = "sha256:" + "1" * 64, "sha256:" + "2" * 64
    world.put(names.map_key(world.store, damaged), b"{}")
    others = {"same": digest, "gone": missing, "bad": damaged}
    verdict = run(world, otherMapDigests=others, run="lane.agent-2")
    assert verdict.cold is not None
    assert set(verdict.cold.others) == {"same"}
    assert verdict.cold.others["same"] == verdict.cold.in_sample
    notes = " ".join(read_report(world, verdict).notes)
    assert "class gone" in notes and "class bad" in notes


def test_a_map_that_is_not_better_than_the_active_one_is_not_given_to_the_lane(
    world: World,
) -> None:
    world.record([chat(i) for i in range(4)])
    active = run(world).digest
    assert active is not None
    made = len(world.created)
    verdict = run(world, activeMapDigest=active, run="lane.agent-2")
    assert (verdict.outcome, verdict.reason) == ("Rejected", "NotBetterThanCurrent")
    assert active in verdict.message and "the active map stays" in verdict.message
    assert len(world.created) == made
    found = read_report(world, verdict).evidence
    assert found is not None and found.change is not None
    assert found.change.active_digest == active and found.change.rows_moved == 0


def test_a_map_that_is_better_than_the_active_one_is_accepted(world: World) -> None:
    world.record([chat(i) for i in range(4)])
    first = run(world)
    assert first.digest is not None
    rows = store.get_map(world.services().store(world.spec()), first.digest)
    turned = {
        int(layer): ([*found.cold[: len(found.hot)]], [*found.cold[len(found.hot) :], *found.hot])
        for layer, found in rows.layers.items()
    }
    bad = rowmap.build(rows.fingerprint, rows.geometry, turned)
    world.put(names.map_key(world.store, bad.digest), bad.to_bytes())
    verdict = run(world, activeMapDigest=bad.digest, run="lane.agent-2")
    assert (verdict.outcome, verdict.digest) == ("Accepted", first.digest)
    assert bad.digest in verdict.message and "better by" in verdict.message


def test_an_active_map_of_another_model_has_not_to_be_beaten(world: World) -> None:
    world.record([chat(i) for i in range(4)])
    first = run(world)
    assert first.digest is not None
    rows = store.get_map(world.services().store(world.spec()), first.digest)
    other = rows.fingerprint.model_copy(update={"router": "sha256:" + "9" * 64})
    layers = {int(n): ([*found.hot], [*found.cold]) for n, found in rows.layers.items()}
    stranger = rowmap.build(other, rows.geometry, layers)
    world.put(names.map_key(world.store, stranger.digest), stranger.to_bytes())
    for run_, digest in (("lane.agent-2", stranger.digest), ("lane.agent-3", "sha256:" + "1" * 64)):
        verdict = run(world, activeMapDigest=digest, run=run_)
        assert verdict.outcome == "Accepted"
        assert any("the active map" in note for note in read_report(world, verdict).notes)


def test_a_dead_engine_is_worth_another_try(world: World) -> None:
    world.record([chat(i) for i in range(3)])
    world.engine.faults.failing_posts = 1000
    with pytest.raises(RunError) as refused:
        run(world)
    assert refused.value.reason == "EngineFailed" and not refused.value.final
    assert json.dumps(chat(0)["request"]["messages"][0]["content"])[1:9] not in str(refused.value)


def test_an_engine_that_restarted_while_counting_is_noticed(world: World) -> None:
    world.record([chat(i) for i in range(3)])
    engine, original = world.engine, world.engine.complete

    def restart(body: dict[str, Any]) -> Any:
        engine.status = {**engine.status, "pid": 8}
        return original(body)

    engine.complete = restart  # type: ignore[method-assign]
    with pytest.raises(RunError) as refused:
        run(world)
    assert refused.value.reason == "EngineFailed"
    assert "the engine restarted" in refused.value.message


def test_a_key_is_sent_to_a_server_that_wants_one(world: World) -> None:
    world.record([chat(i) for i in range(3)])
    world.engine.faults.key = "sesame"
    with pytest.raises(RunError) as refused:
        run(world)
    assert refused.value.reason == "EngineUnauthorized" and refused.value.final
    verdict = profile.run(world.spec(), world.services(api_key="sesame"))
    assert verdict.outcome == "Accepted"


def test_optional_checks_that_cannot_be_made_are_left_out(world: World) -> None:
    world.record([chat(i) for i in range(3)])
    world.engine.faults.no_live = world.engine.faults.no_logprobs = True
    report = read_report(world, run(world))
    assert report.trick_check is None and report.off_policy is None
