"""Memory of the accelerator that a worker runs on: what is free, fresh tensors, pinned ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import expertmaps_hook_pinned as pinned
    from .expertmaps_hook_env import HookError
    from .expertmaps_hook_plan import Bytes
else:
    import expertmaps_hook_pinned as pinned
    from expertmaps_hook_env import HookError
    from expertmaps_hook_plan import Bytes


class CudaDevice:
    """One CUDA device, as torch knows it."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def pinned(self) -> pinned.Pinned:
        """Pinned memory next to this device. Raises HookError (HookUnsupported)."""
        import torch

        found = torch.cuda.get_device_properties(self.device)
        bus = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        runtime = pinned.CudaRuntime(pinned.load_cudart(torch.version.cuda))
        return pinned.Pinned(runtime, pinned.cpus_near(bus))

    def empty(self, rows: int, row_bytes: int) -> Any:
        """Fresh device memory, uint8 [rows, row_bytes]."""
        import torch

        return torch.empty((rows, row_bytes), dtype=torch.uint8, device=self.device)

    def view(self, address: int, size: int) -> Any:
        """A device tensor over registered host memory, uint8 [size], without a copy.

        The array interface takes the very address that CUDA gave for the block. vLLM's own
        helper takes a pinned CPU tensor instead, and torch would have to see ours as pinned.
        Raises HookError (PinFailed) when torch made a copy.
        """
        import torch

        source = type("Interface", (), {})()
        source.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip
        found = torch.as_tensor(source, device=self.device)
        if found.data_ptr() != address:
            raise HookError("PinFailed", "torch copied pinned memory, expected a view in place")
        return found

    def sync(self) -> None:
        """Wait until the device has done everything it was given."""
        import torch

        torch.cuda.synchronize(self.device)

    def free(self) -> Bytes:
        """Bytes free now, once torch's allocators have given back what nobody uses."""
        import torch

        self.sync()
        torch.cuda.empty_cache()
        torch.accelerator.empty_host_cache()
        return Bytes(int(torch.cuda.mem_get_info(self.device)[0]), pinned.host_free())
