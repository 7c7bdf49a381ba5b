"""A model's forward pass compiled ahead of time, as files in the cache folder, and how they are loaded.

A program is a folder with a shared library that torch's AOTInductor made (code and rearranged weights), a JSON file that
lists the operations it calls back (`kitelib::attend`), and `program.json`. Loading links the library into this process:
nothing is unpickled, but the library is code. So it is only taken from a folder that belongs to this user and that
nobody else may write to.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
from typing import TYPE_CHECKING, Any

from kitelib.backends.digest import default_cache_dir
from kitelib.backends.torch_engine.versions import processor
from kitelib.errors import BackendError
from kitelib.fingerprint import encode_fields

if TYPE_CHECKING:
    import torch

__all__ = [
    "LIBRARY",
    "OPERATIONS",
    "RECORD",
    "Program",
    "ProgramRecord",
    "failure_file",
    "program_folder",
    "private_folder",
]

LIBRARY, OPERATIONS, RECORD = "step.so", "step.json", "program.json"
_FORMAT = 1
"""Of the folder and of what the program computes; a program of another format is never found."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramRecord:
    """What `program.json` says.

    Attributes:
        max_rows: most rows of a pass.
        library_bytes: size of the library file; its weights are nearly all of it.
        uses_amx: whether it runs tile instructions, which a process has to ask the system for.
        compile_s: how long compiling took.
        speedup: time of a step of 16 rows before, over the time now, as measured in the compiling process.
    """

    max_rows: int
    library_bytes: int
    uses_amx: bool
    compile_s: float
    speedup: float

    def write(self, folder: pathlib.Path) -> None:
        """Writes it into a program's folder."""
        (folder / RECORD).write_text(json.dumps(dataclasses.asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: pathlib.Path) -> ProgramRecord | None:
        """That of a complete program; None if there is none."""
        try:
            found = cls(**json.loads((folder / RECORD).read_bytes()))
            complete = (folder / LIBRARY).stat().st_size == found.library_bytes and (folder / OPERATIONS).exists()
        except (OSError, ValueError, TypeError):
            return None
        return found if complete else None


class Program:
    """A program in this process. Holds about `ProgramRecord.library_bytes` of memory; can't be unloaded for sure."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Loads it. Blocks, and holds the GIL, while it copies the weights: 0.45 s for 328 MB on
        a busy machine.

        Raises:
            BackendError: it is damaged, belongs to somebody else, or does not run here.
        """
        import torch

        record = ProgramRecord.read(folder)
        if record is None:
            raise BackendError(f"the compiled program at {str(folder)!r} is incomplete; delete the folder")
        check_private(folder)
        if record.uses_amx and not torch.cpu._init_amx():
            raise BackendError("the system does not let this process use AMX, which the compiled program needs")
        self.record = record
        aoti: Any = torch._C._aoti
        try:
            self._runner = aoti.AOTIModelContainerRunnerCpu(str(folder / LIBRARY), 1)
        except RuntimeError as error:
            raise BackendError(f"the compiled program at {str(folder)!r} can't be loaded: {error}") from error

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, select: torch.Tensor) -> torch.Tensor:
        """Logits of some rows of a pass; runs inside of `use_step`.

        Args:
            ids: int64 (1, rows), contiguous, 1 to `record.max_rows` rows.
            positions: int64 (1, rows), contiguous.
            select: int64 (outputs,), at least one: the rows whose logits are wanted.

        Returns:
            (outputs, vocabulary), in the model's type.
        """
        logits: torch.Tensor = self._runner.run([ids, positions, select])[0]
        return logits


def program_folder(
    cache_dir: pathlib.Path | None, model_state: bytes, threads: int, max_rows: int, experts: str | None = None
) -> pathlib.Path:
    """Where the program of a model for this machine and these packages is, or would be.

    Args:
        cache_dir: the engine's cache folder; None means the user's.
        model_state: `OpenedModel.model_state`: weights, configuration and types.
        threads: that it computes with; they are fixed in its code.
        max_rows: most rows of a pass.
        experts: as of `open_model`.
    """
    base = default_cache_dir().parent if cache_dir is None else cache_dir
    fields = (_FORMAT, model_state, threads, max_rows, experts or "", *_platform())
    return base / "compiled" / hashlib.sha256(encode_fields("kite.torch.program", *fields)).hexdigest()[:32]


def failure_file(folder: pathlib.Path) -> pathlib.Path:
    """Holds the reason why a program could not be made, in words, so that nobody tries again."""
    return folder.with_name(folder.name + ".failed")


@functools.lru_cache(maxsize=1)
def _platform() -> tuple[str, ...]:
    """What decides whether a library runs here, and what its code would be."""
    import torch

    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    return (*versions, str(torch.backends.cpu.get_cpu_capability()), *processor(), str(os.cpu_count()))


def private_folder(path: pathlib.Path) -> None:
    """Makes a folder that only this user can use.

    Raises:
        BackendError: it is there, but not only this user's.
        OSError: it can't be made.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_private(path)


def check_private(path: pathlib.Path) -> None:
    """See `private_folder`."""
    if os.name != "posix":
        return
    for place in (path, path.parent):
        status = place.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            raise BackendError(
                f"{str(place)!r} holds code that this process would run, but others may write to it; "
                "make it yours alone (chmod go-w), or give another cache_dir"
            )
