"""What the engine loaded: MoE layers, their tensors, geometry and fingerprint, and the refusals.

Nothing of torch or vLLM is imported at the top: the functions take the engine's own objects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import expertmaps_hook_checkpoint as checkpoint
    from . import expertmaps_hook_installers as installers
    from . import expertmaps_hook_tensors as tensors
    from .expertmaps_hook_env import HookError
    from .expertmaps_hook_map import ModelShape
    from .expertmaps_hook_runner import draft_model
else:
    import expertmaps_hook_checkpoint as checkpoint
    import expertmaps_hook_installers as installers
    import expertmaps_hook_tensors as tensors
    from expertmaps_hook_env import HookError
    from expertmaps_hook_map import ModelShape
    from expertmaps_hook_runner import draft_model

DEVICES = ("cpu", "cuda")
REFUSED_ROUTERS = {
    "ZeroExpertRouter": "gives tokens to experts without rows, under the number of another one",
    "RoutingSimulatorRouter": "makes its choices up",
}
SHORT_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class MoeLayer:
    """One MoE layer of the loaded model."""

    layer: int
    module: Any
    """The MoERunner."""
    names: tuple[str, ...] = tensors.EXPERT_TENSORS
    """Names of the tensors that may have a row for each expert."""

    @property
    def container(self) -> Any:
        """The module that owns the expert tensors."""
        return self.module.routed_experts

    @property
    def experts(self) -> int:
        return int(self.container.local_num_experts)

    def tensors(self) -> dict[str, Any]:
        """Expert tensors by name, in a fixed order."""
        found = ((name, getattr(self.container, name, None)) for name in self.names)
        return {name: tensor for name, tensor in found if tensor is not None}

    def row_bytes(self) -> int:
        """Bytes of one expert over all of its tensors."""
        return sum(row_size(tensor) for tensor in self.tensors().values())


def row_size(tensor: Any) -> int:
    """Bytes of one row of the first dimension."""
    return int(tensor.numel()) * int(tensor.element_size()) // int(tensor.shape[0])


def find_layers(model: Any) -> list[MoeLayer]:
    """MoE layers by absolute id. Raises HookError (NotMoE, LayersUnsupported)."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    layers = [
        MoeLayer(int(module.layer_id), module)
        for module in model.modules()
        if isinstance(module, MoERunner)
    ]
    layers.sort(key=lambda item: item.layer)
    if not layers:
        raise HookError("NotMoE", "the model has no mixture-of-experts layer that vLLM runs")
    ids = [item.layer for item in layers]
    if len(set(ids)) != len(ids):
        raise HookError("LayersUnsupported", f"more than one expert block in a layer: {ids[:32]}")
    return layers


def on_device(layers: list[MoeLayer], device: str) -> list[MoeLayer]:
    """The layers with the expert tensors that a device's kernels have, scales included.

    A layer's row is the same bytes in count and in serve mode, so maps fit. Raises HookError.
    """
    if device == "cpu":
        return layers
    return [replace(item, names=tensors.row_names(item.container, item.experts)) for item in layers]


def check_config(config: Any) -> None:
    """Refuse what this hook would get wrong, from vLLM's configuration. Raises HookError."""
    parallel, model = config.parallel_config, config.model_config
    refusals = (
        (parallel.enable_eplb, "EplbUnsupported", "--enable-eplb moves experts by itself"),
        (parallel.use_ubatching, "DboUnsupported", "--enable-dbo runs two batches over one buffer"),
        (
            parallel.enable_expert_parallel and parallel.world_size_across_dp > 1,
            "ExpertParallelUnsupported",
            "--enable-expert-parallel over more than one rank",
        ),
        (
            parallel.world_size_across_dp > 1,
            "ParallelismUnsupported",
            f"found {parallel.world_size_across_dp} ranks, expected 1",
        ),
        (config.lora_config is not None, "LoraUnsupported", "--enable-lora adds to the experts"),
        (model.enable_sleep_mode, "SleepModeUnsupported", "--enable-sleep-mode moves weights"),
        (
            _prefetches(config.offload_config),
            "PrefetchOffloadUnsupported",
            "--offload-group-size lets layers take turns in one memory",
        ),
        (
            config.load_config.load_format == "ipc_cache",
            "SharedWeightsUnsupported",
            "--load-format ipc_cache: another process owns the weights",
        ),
        (
            config.weight_transfer_config is not None,
            "WeightReloadUnsupported",
            "weight transfer writes into the weights",
        ),
    )
    for refused, reason, message in refusals:
        if refused:
            raise HookError(reason, message)


def _prefetches(offload: Any) -> bool:
    """Whether vLLM's prefetching offloader is on: named, or chosen by its group size."""
    backend, group = offload.offload_backend, int(offload.prefetch.offload_group_size)
    return bool(backend == "prefetch" or (backend == "auto" and group > 0))


def check_device_config(config: Any, layers: list[MoeLayer], environ: Mapping[str, str]) -> None:
    """Refuse what moves between device and host memory would get wrong. Raises HookError."""
    tuned = {
        name
        for name in (installers.kernel_class(item.container) for item in layers)
        if name in installers.KERNELS and installers.KERNELS[name].tuned_late
    }
    refusals = (
        (
            config.model_config.enable_cumem_allocator,
            "CumemAllocatorUnsupported",
            "--enable-cumem-allocator keeps the memory of rows that moved",
        ),
        (
            environ.get("VLLM_ENABLE_STARTUP_PLAN", "0") not in ("", "0"),
            "StartupPlanUnsupported",
            "VLLM_ENABLE_STARTUP_PLAN gives a boot without the hook the KV cache of one with it",
        ),
        (
            bool(tuned) and bool(config.kernel_config.enable_flashinfer_autotune),
            "AutotuneUnsupported",
            f"{', '.join(sorted(tuned))}: FlashInfer tunes each side after the self-test; expected "
            "--no-enable-flashinfer-autotune",
        ),
    )
    for refused, reason, message in refusals:
        if refused:
            raise HookError(reason, message)


def check_shared(layers: list[MoeLayer]) -> None:
    """Refuse weights that two layers hold at once: moving one layer's rows would move both's.

    Raises HookError (WeightsShared).
    """
    owners: dict[int, int] = {}
    for item in layers:
        for name, tensor in item.tensors().items():
            owner = owners.setdefault(int(tensor.data_ptr()), item.layer)
            if owner != item.layer and tensor.numel():
                raise HookError(
                    "WeightsShared",
                    f"layer {item.layer}: {name} lies where layer {owner} has its own",
                )


def check_layers(layers: list[MoeLayer], device: str) -> None:
    """Refuse layers and tensors this hook does not know. Raises HookError."""
    if device not in DEVICES:
        raise HookError(
            "DeviceUnsupported", f"device: found {device}, expected {' or '.join(DEVICES)}"
        )
    for item in layers:
        container, config = item.container, item.container.moe_config
        fused = getattr(container.expert_map_manager, "num_fused_shared_experts", 0)
        if fused:
            raise HookError(
                "FusedSharedExpertsUnsupported", f"layer {item.layer} fuses {fused} shared experts"
            )
        if int(config.num_local_experts) != int(config.num_experts):
            raise HookError(
                "ExpertParallelUnsupported",
                f"layer {item.layer} holds {config.num_local_experts} of {config.num_experts}",
            )
        router = type(getattr(item.module, "router", None)).__name__
        if router in REFUSED_ROUTERS:
            raise HookError(
                "RouterUnsupported", f"layer {item.layer}: {router} {REFUSED_ROUTERS[router]}"
            )
        if item.module.is_monolithic:
            raise HookError("KernelUnsupported", f"layer {item.layer} has a monolithic kernel")
        if device == "cpu":
            check_tensors(item)
        else:
            installers.installer(item.layer, container).check(item.module)
            tensors.discover(item.layer, container, item.experts)
    check_shared(layers)


def check_tensors(item: MoeLayer) -> None:
    """Refuse a tensor with a row for each expert that is not known. Raises HookError."""
    known = item.tensors()
    for name in tensors.EXPERT_TENSORS[:2]:
        if name not in known:
            raise HookError("UnknownTensor", f"layer {item.layer} has no {name}")
    owned = {id(tensor) for tensor in known.values()}
    pointers = {tensor.data_ptr() for tensor in known.values()}
    for name, tensor in _all_tensors(item):
        if tensor.dim() < 1 or int(tensor.shape[0]) != item.experts or id(tensor) in owned:
            continue
        place = f"layer {item.layer}: {name} {list(tensor.shape)}"
        if tensor.data_ptr() in pointers:
            # Pointing the parameter elsewhere would leave this one behind.
            raise HookError("UnknownTensor", f"{place} is another view of an expert tensor")
        if name not in tensors.ROUTING_TENSORS and name not in tensors.UNREAD_TENSORS:
            raise HookError("UnknownTensor", f"{place} has a row for each expert")
    for name, tensor in known.items():
        if int(tensor.shape[0]) != item.experts or not tensor.is_contiguous():
            raise HookError(
                "UnknownTensor", f"layer {item.layer}: {name} {list(tensor.shape)} is laid out anew"
            )


def _all_tensors(item: MoeLayer) -> Iterator[tuple[str, Any]]:
    """Tensors of a layer wherever a kernel may take them from."""
    container = item.container
    yield from container.named_parameters(recurse=False)
    yield from container.named_buffers(recurse=False)
    kernel = getattr(container.quant_method, "moe_kernel", None)
    quant = getattr(container.quant_method, "moe_quant_config", None)
    owners = [container, container.quant_method, getattr(kernel, "fused_experts", None), quant]
    # Scales, zero points and biases reach a kernel through the descriptors of its weights.
    owners += [getattr(quant, name, None) for name in ("_w1", "_w2")]
    for owner in owners:
        for name, value in vars(owner).items() if owner is not None else ():
            if hasattr(value, "data_ptr") and hasattr(value, "shape"):
                yield name, value


@contextmanager
def recorded_shapes() -> Iterator[dict[int, list[Any]]]:
    """While the engine loads, note each MoE layer's tensors before kernels prepack them.

    Prepacking depends on the instruction set of the node; the shapes before it do not. The
    replaced function is put back in every case.
    """
    from vllm.model_executor.model_loader import base_loader

    noted: dict[int, list[Any]] = {}
    original = base_loader.process_weights_after_loading

    def record_and_process(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not noted:  # the target comes first; a draft model is loaded after it
            try:
                noted.update(shapes_of(find_layers(model)))
            except Exception:
                noted.clear()  # told once loading is over, by the same checks
        return original(model, *args, **kwargs)

    base_loader.process_weights_after_loading = record_and_process
    try:
        yield noted
    finally:
        base_loader.process_weights_after_loading = original


def shapes_of(layers: list[MoeLayer]) -> dict[int, list[Any]]:
    """[name, shape, type] of each expert tensor, by layer."""
    return {
        item.layer: [
            [name, [int(dim) for dim in tensor.shape], str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in sorted(item.container.named_parameters(recurse=False))
        ]
        for item in layers
    }


def shape_digest(shapes: Mapping[int, list[Any]]) -> str:
    """sha256 over the canonical JSON of the shapes."""
    wire = {str(layer): tensors for layer, tensors in shapes.items()}
    text = json.dumps(wire, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode() + b"\n").hexdigest()


def quant_name(config: Any, layers: list[MoeLayer]) -> str:
    """Weight format: the quantisation method, or the type of plain weights."""
    method = config.model_config.quantization
    if method is not None:
        return str(getattr(method, "value", method))
    dtype = str(layers[0].tensors()["w13_weight"].dtype).removeprefix("torch.")
    return SHORT_TYPES.get(dtype, dtype)


def fingerprint(
    config: Any, layers: list[MoeLayer], shapes: Mapping[int, list[Any]]
) -> dict[str, str]:
    """The four parts that a map must have been made for. Raises HookError."""
    model = config.model_config
    folder = checkpoint.local_folder(model.model, model.revision, "CheckpointUnreadable")
    tokenizer = folder
    if model.tokenizer != model.model:
        tokenizer = checkpoint.local_folder(
            model.tokenizer, model.tokenizer_revision, "TokenizerNotFound"
        )
    return {
        "shape": shape_digest(shapes or shapes_of(layers)),
        "router": checkpoint.router_digest(folder, [item.layer for item in layers]),
        "quant": quant_name(config, layers),
        "tokenizer": checkpoint.tokenizer_digest(tokenizer),
    }


def model_shape(layers: list[MoeLayer], whole_layers: tuple[int, ...]) -> ModelShape:
    """Geometry that a map must have. Raises HookError when layers route differently."""
    tops = {int(item.container.top_k) for item in layers}
    if len(tops) != 1:
        raise HookError("LayersUnsupported", f"layers choose {sorted(tops)} experts")
    return ModelShape(
        experts={item.layer: item.experts for item in layers},
        row_bytes={item.layer: item.row_bytes() for item in layers},
        top_k=tops.pop(),
        whole_layers=whole_layers,
    )


def draft_layers(runner: Any, layers: list[MoeLayer]) -> tuple[int, ...]:
    """MoE layers of a draft model: they stay whole."""
    model = draft_model(runner)
    if model is None or not hasattr(model, "modules"):
        return ()
    try:
        found = {item.layer for item in find_layers(model)}
    except HookError:
        return ()
    return tuple(sorted(found - {item.layer for item in layers}))


def wire_geometry(shape: ModelShape) -> dict[str, Any]:
    """ModelGeometry as the status carries it: one integer where all layers agree."""
    return {
        "experts": _folded(shape.experts),
        "topK": shape.top_k,
        "moeLayers": list(shape.layers),
        "wholeLayers": list(shape.whole_layers),
        "rowBytes": _folded(shape.row_bytes),
    }


def _folded(values: Mapping[int, int]) -> int | dict[str, int]:
    distinct = set(values.values())
    if len(distinct) == 1:
        return distinct.pop()
    return {str(layer): value for layer, value in sorted(values.items())}
