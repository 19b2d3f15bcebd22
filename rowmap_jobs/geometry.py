"""The geometry of a lane's maps: the model's shape from the hook, the hot rows from the lane."""

from __future__ import annotations

from .formats.rowmap import Geometry, PerLayer, per_layer
from .formats.status import ModelGeometry
from .reasons import Reason, RunError


def resolve(
    model: ModelGeometry, hot_experts_per_layer: int | None, hot_bytes: int | None
) -> Geometry:
    """The geometry for a residency: so many rows in every layer, or what fits into `hot_bytes`.

    Bytes are those of one accelerator. Rows are uniform over layers (a layer with fewer experts
    is hot whole): the largest H with sum over layers of min(H, experts) x rowBytes <= hotBytes.
    Raises RunError TooManyHotRows.
    """
    if hot_experts_per_layer is None and hot_bytes is None:
        raise RunError(
            Reason.INVALID_RUN_SPEC,
            "residency: found neither, expected hotExpertsPerLayer or hotBytes",
        )
    if hot_experts_per_layer is not None:
        hot = hot_experts_per_layer
        fewest = min(per_layer(model.experts, layer) for layer in model.moe_layers)
        if hot > fewest:
            raise RunError(
                Reason.TOO_MANY_HOT_ROWS,
                f"residency.hotExpertsPerLayer: found {hot}, expected at most {fewest}, the "
                "experts of a layer of this model",
            )
        rows: PerLayer = hot
    else:
        rows = uniform_rows(model, hot_bytes or 0)
    return Geometry(
        experts=model.experts,
        top_k=model.top_k,
        hot_rows=rows,
        moe_layers=model.moe_layers,
        whole_layers=model.whole_layers,
        row_bytes=model.row_bytes,
    )


def uniform_rows(model: ModelGeometry | Geometry, budget: int) -> PerLayer:
    """The largest H with sum over layers of min(H, experts) x rowBytes <= `budget` bytes."""
    layers = model.moe_layers
    experts = [per_layer(model.experts, layer) for layer in layers]
    sizes = [per_layer(model.row_bytes, layer) for layer in layers]

    def needed(hot: int) -> int:
        return sum(min(hot, e) * s for e, s in zip(experts, sizes, strict=True))

    low, high = 0, max(experts)
    while low < high:
        middle = (low + high + 1) // 2
        if needed(middle) <= budget:
            low = middle
        else:
            high = middle - 1
    if low <= min(experts):
        return low
    return {str(layer): min(low, e) for layer, e in zip(layers, experts, strict=True)}


def check_frozen(built: Geometry, frozen: Geometry | None) -> None:
    """Refuse a geometry that is not the lane's. Raises RunError GeometryMismatch naming both."""
    if frozen is None or built == frozen:
        return
    ours, lanes = built.to_wire(), frozen.to_wire()
    differ = [name for name in lanes if lanes[name] != ours.get(name)]
    detail = "; ".join(f"{name}: found {ours.get(name)}, expected {lanes[name]}" for name in differ)
    raise RunError(
        Reason.GEOMETRY_MISMATCH,
        f"geometry: {detail} (the lane's status.geometry): a map of another shape needs a cold "
        "boot: restore `residency` and the model, or make a new lane",
    )
