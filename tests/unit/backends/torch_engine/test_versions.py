"""What moves a bit is part of the execution path: other kinds of processors, other settings of the libraries."""

from __future__ import annotations

import pytest

from kitelib.backends.torch_engine import versions


@pytest.fixture
def cpu() -> object:
    torch = pytest.importorskip("torch")
    return torch.device("cpu")


def test_the_same_machine_gives_the_same_values(cpu: object) -> None:
    assert versions.execution_versions(cpu, 2) == versions.execution_versions(cpu, 2)  # type: ignore[arg-type]
    assert versions.execution_versions(cpu, 2) != versions.execution_versions(cpu, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "ATEN_CPU_CAPABILITY"])
def test_settings_that_choose_other_kernels_count(cpu: object, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name, raising=False)
    before = versions.execution_versions(cpu, 1)  # type: ignore[arg-type]
    monkeypatch.setenv(name, "AVX512_CORE")
    assert versions.execution_versions(cpu, 1) != before  # type: ignore[arg-type]


def test_every_feature_of_the_processor_counts(cpu: object, monkeypatch: pytest.MonkeyPatch) -> None:
    before = versions.execution_versions(cpu, 1)  # type: ignore[arg-type]
    real = versions.processor()
    changed = [line.replace("avx2", "avx2x") if line.startswith(("flags", "Features")) else line for line in real]
    monkeypatch.setattr(versions, "processor", lambda: [*changed[:-1], changed[-1] + " one more"])
    assert versions.execution_versions(cpu, 1) != before  # type: ignore[arg-type]
