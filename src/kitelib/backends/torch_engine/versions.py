"""What else than the model can move a bit: versions of libraries, and the machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["execution_versions"]


def execution_versions(device: torch.device, threads: int) -> dict[str, str | int]:
    """Names and values for `ModelInfo.execution_path`, the same in every process on machines of one kind."""
    import torch
    import transformers

    from kitelib.native.library import native_library

    found: dict[str, str | int] = {"torch": str(torch.__version__), "transformers": str(transformers.__version__)}
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["device_name"] = torch.cuda.get_device_name(device)
        found["capability"] = repr(torch.cuda.get_device_capability(device))
        found["triton"] = importlib.metadata.version("triton")
        return found
    library = native_library()
    found["native"] = "none" if library is None else hashlib.sha256(library.path.read_bytes()).hexdigest()
    found["cpu"] = f"{torch.backends.cpu.get_cpu_capability()} amx={torch.cpu._is_amx_tile_supported()}"
    found["threads"] = threads
    return found
