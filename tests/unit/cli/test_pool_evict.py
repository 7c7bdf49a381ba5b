"""`kite pool evict` and `kite-ru-pool-evict`: exactly the chosen units go, from every tier and every shard."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kitelib.abc import SharedStore
from kitelib.cli import pool_evict
from kitelib.stores.redis import RedisStore
from tests.support.pools import disk_at, entry, filled, key_of, of_model, with_store
from tests.support.redis_servers import RedisCluster, RedisServer
from tests.support.units import kv_unit, units_of

MODEL, OTHER = "6d" * 8, "6e" * 8
Run = Callable[..., tuple[int, str, str]]


def prompt(number: int) -> list[int]:
    return [number, *range(1, 9)]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A disk tier: of one model three prompts of epoch 1 and two of epoch 3, and of another model one unit of 0."""
    folder = tmp_path / "pool"
    old = [unit for number in range(3) for unit in units_of(prompt(number), epoch=1)]
    new = [unit for number in range(3, 5) for unit in units_of(prompt(number), epoch=3)]
    other = of_model(kv_unit(prompt(9), 0, 4), b"n")
    filled(disk_at(folder), [entry(unit) for unit in [*old, *new, other]])
    return folder


def keys_in(make: Callable[[], SharedStore]) -> set[str]:
    async def listed(store: SharedStore) -> set[str]:
        return {item.key async for page in store.list_items() for item in page}

    return with_store(make, listed)


def expected(*numbers: int, epoch: int = 1) -> set[str]:
    return {key_of(unit) for number in numbers for unit in units_of(prompt(number), epoch=epoch)}


OTHER_KEY = key_of(of_model(kv_unit(prompt(9), 0, 4), b"n"))


def test_freshness_deletes_what_is_older_than_its_models_epoch(kite_pool: Run, disk: Path) -> None:
    filled(disk_at(disk), [], **{MODEL: 3})
    code, out, err = kite_pool("evict", "--freshness", "--disk", disk)
    assert (code, err) == (0, "")
    assert out.startswith("disk: 12 units (")
    assert out.endswith(") deleted\n")
    assert keys_in(disk_at(disk)) == expected(3, 4) | {OTHER_KEY}


def test_freshness_without_a_raised_epoch_deletes_nothing(kite_pool: Run, disk: Path) -> None:
    assert kite_pool("evict", "--freshness", "--disk", disk) == (0, "disk: 0 units (0 B) deleted\n", "")
    assert len(keys_in(disk_at(disk))) == 21


def test_a_dry_run_deletes_nothing_and_says_what_it_would(kite_pool: Run, disk: Path) -> None:
    filled(disk_at(disk), [], **{MODEL: 3})
    before = keys_in(disk_at(disk))
    code, out, _ = kite_pool("evict", "--freshness", "--dry-run", "--disk", disk)
    assert (code, out.startswith("disk: 12 units (")) == (0, True)
    assert out.endswith(") would be deleted\n")
    assert keys_in(disk_at(disk)) == before
    code, out, _ = kite_pool("evict", "--all", "--dry-run", "--json", "--disk", disk)
    report = json.loads(out)
    assert (code, report["dry_run"]) == (0, True)
    assert [(tier["tier"], tier["chosen"], tier["deleted"]) for tier in report["tiers"]] == [("disk", 21, 0)]
    assert keys_in(disk_at(disk)) == before


def test_options_must_all_be_met(kite_pool: Run, disk: Path) -> None:
    filled(disk_at(disk), [], **{MODEL: 3})
    code, out, _ = kite_pool("evict", "--freshness", "--kind", "logits", "--disk", disk)
    assert (code, out.startswith("disk: 3 units (")) == (0, True)
    code, out, _ = kite_pool("evict", "--model", "6e", "--kind", "logits", "--disk", disk)
    assert (code, out) == (0, "disk: 0 units (0 B) deleted\n")
    code, out, _ = kite_pool("evict", "--model", OTHER, "--disk", disk)
    assert (code, out.startswith("disk: 1 units (")) == (0, True)
    assert OTHER_KEY not in keys_in(disk_at(disk))


def test_times_choose_by_writing_and_by_use(kite_pool: Run, disk: Path) -> None:
    for path in (disk / "values").rglob("*.ru"):
        status = path.stat()
        if "logits" in path.name:
            os.utime(path, (status.st_atime, status.st_mtime - 10 * 86400))
    assert kite_pool("evict", "--idle", "9d", "--disk", disk)[1].startswith("disk: 0 units")
    assert kite_pool("evict", "--older-than", "11d", "--disk", disk)[1].startswith("disk: 0 units")
    assert kite_pool("evict", "--older-than", "9d", "--disk", disk)[1].startswith("disk: 5 units")
    assert not [key for key in keys_in(disk_at(disk)) if ":logits:" in key]
    for path in (disk / "values").rglob("*.ru"):
        os.utime(path, (1e9, 1e9))
    assert kite_pool("evict", "--idle", "1w", "--disk", disk)[1].startswith("disk: 16 units")


def test_redis_goes_by_when_a_unit_was_made(kite_pool: Run, redis_server: RedisServer) -> None:
    def make() -> SharedStore:
        return RedisStore(redis_server.url)

    old, new = units_of(prompt(0)), [dataclasses.replace(unit, created_at=time.time()) for unit in units_of(prompt(1))]
    filled(make, map(entry, [*old, *new]))
    url = ["--redis", redis_server.url]
    oldest = json.loads(kite_pool("ls", *url, "--sort", "written", "--json")[1])["units"][4:]
    assert {unit["key"] for unit in oldest} == expected(0)
    assert len(json.loads(kite_pool("ls", *url, "--older-than", "1h", "--json")[1])["units"]) == 4
    assert kite_pool("evict", "--older-than", "1h", *url)[1].startswith("redis: 4 units (")
    assert keys_in(make) == expected(1)


def test_everything_is_only_deleted_if_that_is_meant(kite_pool: Run, disk: Path, monkeypatch: Any) -> None:
    before = keys_in(disk_at(disk))
    code, out, err = kite_pool("evict", "--disk", disk)
    assert (code, out) == (2, "")
    assert "nothing says which units to delete" in err
    code, out, err = kite_pool("evict", "--all", "--kind", "kv", "--disk", disk)
    assert (code, out) == (2, "")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    code, out, err = kite_pool("evict", "--all", "--disk", disk)
    assert (code, out, err) == (2, "", "kite: --all deletes everything, and nobody is there to be asked; add --yes\n")
    assert keys_in(disk_at(disk)) == before


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("yes\n", 0), ("\n", 21), ("no\n", 21), ("", 21)])
def test_a_person_is_asked_before_everything_goes(
    kite_pool: Run, disk: Path, monkeypatch: pytest.MonkeyPatch, answer: str, left: int
) -> None:
    class Keyboard(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Keyboard(answer))
    code, _, err = kite_pool("evict", "--all", "--disk", disk)
    assert "Delete everything in: disk? [y/N]" in err
    assert code == (1 if left else 0)
    assert len(keys_in(disk_at(disk))) == left


def test_epochs_survive_deleting_everything(kite_pool: Run, disk: Path) -> None:
    filled(disk_at(disk), [], **{MODEL: 3})
    assert kite_pool("evict", "--all", "--yes", "--disk", disk)[0] == 0
    assert keys_in(disk_at(disk)) == set()

    async def epoch(store: SharedStore) -> int:
        return await store.get_epoch(MODEL)

    assert with_store(disk_at(disk), epoch) == 3


def test_freshness_reaches_every_tier_and_every_shard(kite_pool: Run, disk: Path, redis_cluster: RedisCluster) -> None:
    """B20: one command covers all tiers and shards, and says what it cleared. The epoch is the highest that any tier
    knows: here only the cluster has heard of it."""
    old = [unit for number in range(40) for unit in units_of(prompt(number), epoch=1)]
    new = [unit for number in range(40, 45) for unit in units_of(prompt(number), epoch=3)]

    def make() -> SharedStore:
        return RedisStore(redis_cluster.url, ttl_s=600)

    filled(make, [entry(unit) for unit in [*old, *new]], **{MODEL: 3})
    held = [int(node.call("DBSIZE")) for node in redis_cluster.nodes]
    assert sum(count > 0 for count in held) == 6  # all primaries and their replicas
    nodes = ", ".join(f"'redis://{node.name}'" for node in redis_cluster.nodes[:2])
    config = disk.parent / "kite.yaml"
    config.write_text(f"ru_pool: {{backend: tiered, disk_path: {disk}, redis_urls: [{nodes}]}}")
    code, out, err = kite_pool("evict", "--freshness", "--config", config, "--json")
    assert (code, err) == (0, "")
    tiers = json.loads(out)["tiers"]
    assert [(tier["tier"], tier["chosen"], tier["deleted"]) for tier in tiers] == [
        ("disk", 12, 12),
        ("redis", 160, 160),
    ]
    assert keys_in(make) == expected(*range(40, 45))
    assert keys_in(disk_at(disk)) == expected(3, 4) | {OTHER_KEY}


def test_a_tier_that_fails_is_told_and_the_others_are_cleaned(kite_pool: Run, disk: Path) -> None:
    code, out, _ = kite_pool("evict", "--kind", "logits", "--disk", disk, "--redis", "redis://127.0.0.1:1")
    assert code == 1
    assert out.startswith("disk: 5 units (")
    assert "\nredis: " in out


def test_a_shard_that_is_down_makes_the_work_incomplete(kite_pool: Run, redis_cluster: RedisCluster) -> None:
    """B26: what could not be counted or deleted is told, not taken for nothing."""

    def make() -> SharedStore:
        return RedisStore(redis_cluster.url, ttl_s=600)

    units = [unit for number in range(40) for unit in units_of(prompt(number))]
    filled(make, [entry(unit) for unit in units])
    primary = redis_cluster.primaries()[0]
    redis_cluster.replica_of(primary).kill()
    primary.kill()
    options = ["--redis", redis_cluster.url]
    code, out, _ = kite_pool("stats", *options, "--json")
    (tier,) = json.loads(out)["tiers"]
    assert code == 0
    assert 0 < tier["items"] < len(units)
    said = re.compile("incomplete|can't connect")  # the node that is down may have been the one with the epoch
    assert said.search(tier["problem"])
    code, out, _ = kite_pool("evict", "--all", "--yes", *options)
    assert code == 1
    assert said.search(out)


# kite-ru-pool-evict


def test_the_command_of_its_own_does_the_same(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(disk_at(disk), [], **{MODEL: 3})
    monkeypatch.delenv("KITE_REDIS_URL", raising=False)
    assert pool_evict.main(["--freshness", "--disk", str(disk)]) == 0
    assert capsys.readouterr().out.startswith("disk: 12 units (")
    assert pool_evict.main(["--disk", str(disk)]) == 2
    assert capsys.readouterr().err.startswith("kite-ru-pool-evict: nothing says which units to delete")


def test_the_console_script_is_installed(disk: Path) -> None:
    filled(disk_at(disk), [], **{MODEL: 3})
    script = Path(sys.executable).parent / "kite-ru-pool-evict"
    code = "import sys; from kitelib.cli.pool_evict import main; sys.exit(main())"
    command = [str(script)] if script.exists() else [sys.executable, "-c", code]
    done = subprocess.run([*command, "--freshness", "--disk", disk], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("disk: 12 units (")
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "kite-ru-pool-evict --freshness" in done.stdout.partition("examples:")[2]
