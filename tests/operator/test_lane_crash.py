"""Rollouts under crashes, bad pods and changes of mind, in a world in memory (a stand-in)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertmaps_operator.api.expertlane import ExpertLane, Rollout
from expertmaps_operator.build import workload_fields as fields
from expertmaps_operator.decide.lane import decide
from tests.operator.lane_objects import (
    AGENT,
    PROSE,
)
from tests.operator.lane_world import Pod, World

ENDED = ("Idle", "RolloutStopped", "DigestHeld")
"""Reasons of Progressing when a story has come to its end."""
BACK = ("RollingBack", "RolledBack")
MOST_CRASHES = 2
"""Turns lost in a row: a pod takes longer than that to boot and to count as available."""


@dataclass(frozen=True)
class Story:
    """One run: what the cluster is like, what fails, when the operator dies."""

    replicas: int
    boots: int
    leaves: int
    bad: tuple[int, str] | None
    crashes: tuple[int | None, ...]
    switch_at: int | None
    outage_at: int | None
    rollback: bool


stories = st.builds(
    Story,
    replicas=st.integers(1, 4),
    boots=st.integers(2, 4),
    leaves=st.integers(1, 3),
    bad=st.none()
    | st.tuples(st.integers(1, 4), st.sampled_from(["hook", "crash", "digest", "stuck"])),
    crashes=st.lists(st.none() | st.integers(0, 3), max_size=60).map(tuple),
    switch_at=st.none() | st.integers(1, 40),
    outage_at=st.none() | st.integers(1, 40),
    rollback=st.sampled_from([True, True, True, False]),
)


class Watch:
    """Drives a world and checks what must hold after every step."""

    def __init__(self, world: World, story: Story) -> None:
        self.world, self.crashes, self.lost, self.number = world, story.crashes, 0, 0
        self.outage_at, self.looked = story.outage_at, 0
        self.templates = [(fields.in_template(world.workload) or ("", ""))[0]]

    def step(self) -> None:
        crash = self.crashes[self.number] if self.number < len(self.crashes) else None
        self.number += 1
        if crash is not None and self.lost >= MOST_CRASHES:
            crash = None
        self.lost = self.lost + 1 if crash is not None else 0
        applies = len(self.world.applies)
        self.check_again()
        self.world.turn(crash)
        self.check_intent(applies)
        self.world.tick()
        self.check_pods()
        self.looked = self.looked + 1 if crash is None and self.world.unproven() == 1 else 0
        if self.outage_at is not None and self.number >= self.outage_at and self.looked > 1:
            self.outage()

    def outage(self) -> None:
        """Once the operator has seen that a pod is taken, no other follows, whoever is gone."""
        self.outage_at = None
        for _ in range(30):
            self.world.tick()
            self.check_pods()

    def check_pods(self) -> None:
        """One pod at most serves nothing; on the way forth, one at most has not proved its map.

        On the way back a pod may serve without a map while another one is replaced.
        """
        assert self.world.not_ready() <= 1
        assert self.state() in BACK or self.world.unproven() <= 1

    def check_intent(self, applies: int) -> None:
        """A write that changes the template is announced by the status that is stored."""
        rollout = self.world.lane.status.rollout
        for item in self.world.applies[applies:]:
            assert rollout is not None
            spec = item.patch.get("spec") or {}
            digest, _ = fields.in_template({"spec": spec}) or ("", "")
            before = self.templates[-1]
            former = rollout.from_.digest if rollout.from_ is not None else ""
            assert digest in (before, former if rollout.state in BACK else rollout.to.digest)
            self.templates.append(digest)

    def check_again(self) -> None:
        """Deciding again on the same facts says and does the same, and sends no event twice."""
        facts, now = self.world.snapshot(), self.world.now
        plan = decide(facts, now)
        if plan.status is None or plan.requeue_after == 0:
            return
        wire = self.world.lane.model_dump(mode="json", by_alias=True, exclude_none=True)
        written = ExpertLane.model_validate({**wire, "status": plan.status})
        again = decide(replace(facts, lane=written), now + timedelta(seconds=1))
        assert again.events == ()
        assert again.status == plan.status
        assert again.actions == plan.actions

    def state(self) -> str:
        rollout = self.world.lane.status.rollout
        return rollout.state if rollout is not None else ""

    def ended(self) -> bool:
        lane = self.world.lane
        seen = lane.status.observed_generation == lane.metadata.generation
        return seen and self.world.condition("Progressing")[1] in ENDED

    def until_ended(self) -> None:
        for _ in range(250):
            self.step()
            if self.number > len(self.crashes) and self.ended():
                return
        raise AssertionError(f"never ended: {self.world.said()}")


def world_of(story: Story, digest: str) -> World:
    bad = {} if story.bad is None else {(digest, story.bad[0]): story.bad[1]}
    world = World(
        replicas=story.replicas,
        boots=story.boots,
        leaves=story.leaves,
        bad=bad,
        rollback=story.rollback,
    )
    world.edit(update={"progressDeadlineSeconds": 322, "minReadySeconds": 10})
    return world


def check_end(world: World) -> None:
    rollout = world.lane.status.rollout
    assert rollout is not None
    failed = [pod for pod in world.pods if pod.behaviour != "good"]
    if rollout.state == "RolledBack":
        check_rolled_back(world, rollout, failed)
    elif rollout.state == "Verified":
        assert not failed and world.lane.status.active == rollout.to
        world.run(4)
        assert not fields.gate_in_use(world.workload)
        assert world.condition("Ready") == ("True", "LaneServing")
    else:
        assert failed and fields.gate_closed(world.workload)
        assert world.condition("Ready")[0] == "False"


def check_rolled_back(world: World, rollout: Rollout, failed: list[Pod]) -> None:
    assert not failed and world.lane.status.active == rollout.from_
    world.run(4)
    assert not fields.gate_in_use(world.workload) and world.unproven() == 0
    former = rollout.from_
    expected = None if former is None else (former.digest, former.hook_digest)
    assert fields.in_template(world.workload) == expected
    if world.lane.spec.active_traffic_class == rollout.to.traffic_class:
        assert world.condition("Progressing") == ("False", "DigestHeld")
        assert world.condition("RolledBack")[0] == "True"
    if former is None:
        assert world.condition("Ready") == ("False", "ServingUnhooked")
        assert world.workload["spec"]["template"] == world.own_template
    else:
        assert world.condition("Ready") == ("True", "LaneServing")


common = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@common
@given(stories)
def test_the_first_rollout_ends_verified_or_back_at_the_own_template(story: Story) -> None:
    watch = Watch(world_of(story, AGENT.digest), story)
    watch.until_ended()
    check_end(watch.world)
    many_writes = 8 * story.replicas + len(story.crashes) + 12
    assert len(watch.world.applies) <= many_writes


@common
@given(stories)
def test_a_switch_and_the_way_back(story: Story) -> None:
    world = world_of(story, PROSE.digest).until("Verified").run(3)
    world.edit(activeTrafficClass="prose")
    watch = Watch(world, story)
    if story.switch_at is not None:
        for _ in range(story.switch_at):
            watch.step()
        world.edit(activeTrafficClass="code")
    watch.until_ended()
    check_end(world)
    world.edit(activeTrafficClass="agent")
    for _ in range(3):
        watch.step()
    watch.until_ended()
    active = world.lane.status.active
    assert active is not None and active.traffic_class == "agent"
    check_end(world)
