"""Pytest plugin: a test file that collects no test fails the run, instead of silently testing nothing."""

from __future__ import annotations

from collections.abc import Generator

import pytest

__all__: list[str] = []

_COLLECTED = pytest.StashKey[set[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Notes every file that was read without error; a file that skips itself says so in the summary."""
    report = yield
    if isinstance(collector, pytest.File) and report.passed:
        collector.config.stash.setdefault(_COLLECTED, set()).add(collector.nodeid)
    return report


@pytest.hookimpl(tryfirst=True)  # before -k and -m take tests away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Compares the files with those that the tests come from."""
    empty = config.stash.get(_COLLECTED, set()) - {item.nodeid.partition("::")[0] for item in items}
    if empty:
        raise pytest.UsageError(f"these test files hold no test: {', '.join(sorted(empty))}")
