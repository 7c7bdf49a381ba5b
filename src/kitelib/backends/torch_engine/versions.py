"""What else than the model can move a bit: versions of libraries, and the machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["execution_versions", "processor"]


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
    found["cpu_model"] = hashlib.sha256("\n".join(processor()).encode()).hexdigest()[:32]
    found["threads"] = threads
    return found


# oneDNN, MKL and PyTorch choose other kernels when these are set.
_KERNEL_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_CPU_ISA_HINTS",
    "ONEDNN_MAX_CPU_ISA",
)
_PROCESSOR_LINES = (
    "vendor_id",
    "cpu family",
    "model",
    "flags",
    "CPU implementer",
    "CPU part",
    "CPU variant",
    "Features",
)


def processor() -> list[str]:
    """What decides which kernels run here: the kind of processor, all its features, and what the environment says."""
    found = [platform.machine(), *(f"{name}={os.environ.get(name, '')}" for name in _KERNEL_VARIABLES)]
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [*found, platform.processor()]
    first = dict.fromkeys(_PROCESSOR_LINES, "")
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in first and not first[name.strip()]:
            first[name.strip()] = " ".join(sorted(value.split()))
    return [*found, *(f"{name}={value}" for name, value in first.items())]
