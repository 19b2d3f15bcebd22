"""The kinds that the operator speaks of, and where the API server has them."""

from __future__ import annotations

from dataclasses import dataclass

from rowmap_jobs.formats.names import GROUP, LABEL_ROLE, VERSION


@dataclass(frozen=True)
class Resource:
    """A namespaced kind of the API."""

    group: str
    version: str
    kind: str
    plural: str
    selector: str = ""
    """Label selector under which the operator watches it; empty: all objects."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """URL path of a collection, an object or a subresource."""
        root = "/apis" if self.group else "/api"
        parts = [root, self.api_version, "namespaces", namespace, self.plural, name, subresource]
        return "/".join(part for part in parts if part)


TRAFFIC_CLASS = Resource(GROUP, VERSION, "TrafficClass", "trafficclasses")
EXPERT_LANE = Resource(GROUP, VERSION, "ExpertLane", "expertlanes")
EXPERT_MAP = Resource(GROUP, VERSION, "ExpertMap", "expertmaps")
DEPLOYMENT = Resource("apps", "v1", "Deployment", "deployments")
REPLICA_SET = Resource("apps", "v1", "ReplicaSet", "replicasets")
POD = Resource("", "v1", "Pod", "pods")
JOB = Resource("batch", "v1", "Job", "jobs", LABEL_ROLE)
CONFIG_MAP = Resource("", "v1", "ConfigMap", "configmaps", LABEL_ROLE)
EVENT = Resource("", "v1", "Event", "events")
LEASE = Resource("coordination.k8s.io", "v1", "Lease", "leases")

CUSTOM = (TRAFFIC_CLASS, EXPERT_LANE, EXPERT_MAP)
WATCHED = (*CUSTOM, DEPLOYMENT, POD, JOB, CONFIG_MAP)
"""A job or ConfigMap is only watched when it carries our role label."""

BY_KIND = {resource.kind: resource for resource in (*WATCHED, REPLICA_SET, EVENT, LEASE)}
