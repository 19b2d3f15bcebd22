"""Which ConfigMaps of a lane nobody needs any more.

Kept is what a pod may still be started with (the template, every ReplicaSet that a rollback may go
back to, pods, unfinished Jobs), what the lane's status goes back to, and every accepted map. A map
that a run has just made waits for its verdict: it is kept while the run of its class goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rowmap_jobs.formats import names

from ..api.expertlane import ExpertLane, ExpertLaneStatus, MapInForce
from ..plan import DeleteConfigMap
from ..snapshot import Child, LaneSnapshot


def lane_garbage(
    snapshot: LaneSnapshot, lane: ExpertLane, status: ExpertLaneStatus
) -> tuple[DeleteConfigMap, ...]:
    """ConfigMaps of a lane to delete; none while its workload is not there, the lane is paused or a
    map cannot be read, which may need one.

    `status` is the one that this turn writes: what it names is kept.
    """
    if snapshot.workload is None or lane.spec.paused or not snapshot.all_maps_readable:
        return ()
    kept = set(snapshot.mounted)
    kept.add(names.hook_configmap(lane.metadata.name, snapshot.settings.hook.digest))
    digests = set()
    for item in _in_force(status):
        digests.add(item.digest)
        kept.add(names.hook_configmap(lane.metadata.name, item.hook_digest))
    measured = set()
    for map_ in snapshot.maps:
        if map_.status.accepted is not None:
            digests.add(map_.status.accepted.digest)
        run = map_.status.run
        if run is not None and run.finished_at is None:
            measured.add(map_.spec.traffic_class_ref.name)
    return garbage(snapshot.children, kept, digests, measured)


def garbage(
    children: Iterable[Child],
    kept: Collection[str],
    digests: Collection[str] = (),
    measured: Collection[str] = (),
) -> tuple[DeleteConfigMap, ...]:
    """Those whose name is not in `kept`, nor their digest in `digests`, nor their class in
    `measured`.
    """
    return tuple(
        DeleteConfigMap(child.name, child.uid)
        for child in sorted(children, key=lambda child: child.name)
        if child.name not in kept
        and child.digest not in digests
        and not (child.role == names.ROLE_MAP and child.traffic_class in measured)
    )


def _in_force(status: ExpertLaneStatus) -> Iterable[MapInForce]:
    rollout = status.rollout
    found = [status.active, status.last_known_good]
    if rollout is not None:
        found += [rollout.from_, rollout.to]
    return [item for item in found if item is not None]
