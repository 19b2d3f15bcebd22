"""Which fields of a workload nobody but a lane names."""

from __future__ import annotations

import pytest

from expertmaps_operator.build.workload_fields import only_ours


@pytest.mark.parametrize(
    ("field", "ours"),
    [
        (".spec.template.metadata.annotations.expertmaps.dev/map-digest", True),
        ('.spec.template.spec.volumes[name="expertmaps-map"].configMap.name', True),
        ('.spec.template.spec.containers[name="vllm"].env[name="EXPERTMAPS_MODE"].value', False),
        (
            '.spec.template.spec.containers[name="vllm"]'
            '.volumeMounts[mountPath="/etc/expertmaps"].name',
            False,
        ),
        ('.spec.template.spec.containers[name="vllm"].env[name="PYTHONPATH"].value', False),
        ('.spec.template.spec.volumes[name="cache"].hostPath.path', False),
        (".metadata.labels.expertmaps.dev/lane", False),
        (".spec.minReadySeconds", False),
    ],
)
def test_only_ours(field: str, ours: bool) -> None:
    assert only_ours(field) is ours
