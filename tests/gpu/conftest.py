"""Under pytest: everything here needs a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, and skips them where there is no device."""
    import torch

    here = Path(__file__).parent
    reason = "no CUDA device: torch.cuda.is_available() is False"
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=reason))
