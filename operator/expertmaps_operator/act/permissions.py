"""Every request that the operator makes in a watched namespace, as RBAC spells it.

The chart's Role has exactly these rules. Discovery and /version need none (system:discovery).
Secrets are absent on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass

from rowmap_jobs.formats.names import GROUP


@dataclass(frozen=True)
class Permission:
    """Verbs on one resource (with its subresource, as in `expertlanes/status`)."""

    group: str
    resource: str
    verbs: tuple[str, ...]

    def rule(self) -> dict[str, list[str]]:
        """The PolicyRule."""
        return {
            "apiGroups": [self.group],
            "resources": [self.resource],
            "verbs": list(self.verbs),
        }


PERMISSIONS: tuple[Permission, ...] = (
    Permission(GROUP, "trafficclasses", ("list", "watch")),
    Permission(GROUP, "expertlanes", ("list", "watch")),
    Permission(GROUP, "expertmaps", ("list", "watch")),
    Permission(GROUP, "trafficclasses/status", ("patch",)),
    Permission(GROUP, "expertlanes/status", ("patch",)),
    Permission(GROUP, "expertmaps/status", ("patch",)),
    Permission("apps", "deployments", ("get", "list", "patch", "watch")),
    Permission("apps", "replicasets", ("list",)),
    Permission("", "pods", ("list", "watch")),
    Permission("batch", "jobs", ("create", "delete", "list", "patch", "watch")),
    Permission("", "configmaps", ("create", "delete", "list", "watch")),
    Permission("", "events", ("create", "get", "patch")),
    Permission("coordination.k8s.io", "leases", ("create", "get", "update")),
)
"""By group and resource; verbs in alphabetical order."""
