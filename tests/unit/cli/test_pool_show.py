"""`kite pool stats`, `ls` and `get`: what they say about real tiers, to people and to scripts."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kitelib.stores.memory import MemoryStore
from kitelib.stores.redis import RedisStore
from kitelib.stores.s3 import S3Store
from tests.support.pools import disk_at, entry, filled, key_of, of_model
from tests.support.redis_servers import RedisServer
from tests.support.s3_server import S3Server
from tests.support.units import kv_unit, logits_unit, units_of

MODEL, OTHER = "6d" * 8, "6e" * 8
TOKENS = list(range(1, 10))
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A disk tier with two blocks, a tail and logits of one model, and one block of another."""
    folder = tmp_path / "pool"
    units = [*units_of(TOKENS, epoch=1), of_model(kv_unit(TOKENS, 0, 4), b"n")]
    filled(disk_at(folder), [entry(unit) for unit in units], **{MODEL: 2})
    return folder


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), "requirepass hunter2", password="hunter2")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis: RedisServer) -> str:
    redis.call("FLUSHALL")
    return f"redis://:hunter2@{redis.name}"


# stats


def test_stats_count_per_model_and_kind(kite_pool: Run, disk: Path) -> None:
    code, out, err = kite_pool("stats", "--disk", disk)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["disk", MODEL, "kv", "3"] in [row[:4] for row in rows]
    assert ["disk", MODEL, "logits", "1"] in [row[:4] for row in rows]
    assert ["disk", OTHER, "kv", "1"] in [row[:4] for row in rows]
    assert {row[1]: row[-1] for row in rows if row and row[0] == "disk"} == {MODEL: "2", OTHER: "0"}
    assert "disk: 5 units of " in out


def test_stats_are_honest_about_bytes_after_a_restart(kite_pool: Run, disk: Path) -> None:
    """B21, B26: what another process left is counted, in the bytes that are really there."""
    code, out, _ = kite_pool("stats", "--disk", disk, "--json")
    (tier,) = json.loads(out)["tiers"]
    files = [path for path in (disk / "values").rglob("*") if path.is_file()]
    values = sum(len(entry(unit)[1]) for unit in [*units_of(TOKENS), kv_unit(TOKENS, 0, 4)])
    assert (code, tier["items"], tier["bytes"]) == (0, 5, values)
    assert len(files) == 5
    assert values < sum(path.stat().st_blocks * 512 for path in files) <= tier["bytes_taken"]
    assert {(each["model"], each["kind"], each["items"], each["epoch"]) for each in tier["groups"]} == {
        (MODEL, "kv", 3, 2),
        (MODEL, "logits", 1, 2),
        (OTHER, "kv", 1, 0),
    }
    assert all(each["oldest_written_at"] <= each["newest_written_at"] for each in tier["groups"])
    files[0].unlink()
    assert json.loads(kite_pool("stats", "--disk", disk, "--json")[1])["tiers"][0]["items"] == 4


def test_looking_changes_nothing_on_the_disk(kite_pool: Run, disk: Path) -> None:
    def state() -> dict[str, tuple[float, float, int]]:
        paths = [path for path in (disk / "values").rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_atime, path.stat().st_mtime, path.stat().st_size) for path in paths}

    for path in (disk / "values").rglob("*.ru"):
        os.utime(path, (1e9, 1e9))
    before = state()
    cf = kv_unit(TOKENS, 0, 4).cf.hex()
    for command in (
        ["stats"],
        ["ls"],
        ["get", cf, "--model", MODEL],
        ["verify"],
        ["evict", "--idle", "1s", "--dry-run"],
    ):
        assert kite_pool(*command, "--disk", disk)[0] == 0
    assert state() == before


def test_stats_without_options_look_into_the_cache_folder(kite_pool: Run, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kite" / "pool"
    code, out, _ = kite_pool("stats")
    assert (code, out) == (1, f"disk: there is no folder {str(folder)!r}\n")
    assert not folder.exists()
    filled(disk_at(folder), [entry(kv_unit(TOKENS, 0, 4))])
    assert kite_pool("stats")[0] == 0


def test_a_tier_that_cannot_be_reached_is_a_line_and_stops_no_other(kite_pool: Run, disk: Path, tmp_path: Path) -> None:
    code, out, _ = kite_pool("stats", "--disk", disk, "--redis", "redis://:hunter2@127.0.0.1:1")
    assert code == 0
    assert "disk: 5 units" in out
    assert [line for line in out.splitlines() if line.startswith("redis: ")] != []
    assert "hunter2" not in out
    code, out, _ = kite_pool("stats", "--redis", "redis://:hunter2@127.0.0.1:1")
    assert code == 1
    assert out.startswith("redis: ")
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "cat.jpg").write_bytes(b"")
    code, out, _ = kite_pool("stats", "--disk", foreign)
    assert code == 1
    assert "is no pool of kitelib" in out
    assert [path.name for path in foreign.iterdir()] == ["cat.jpg"]


def test_stats_of_redis_and_disk(kite_pool: Run, disk: Path, redis_url: str, monkeypatch: Any, tmp_path: Path) -> None:
    filled(lambda: RedisStore(redis_url), [entry(unit) for unit in units_of(TOKENS)], **{MODEL: 5})
    secret = tmp_path / "url"
    secret.write_text(redis_url + "\n")
    config = tmp_path / "kite.yaml"
    config.write_text(f"ru_pool: {{backend: tiered, disk_path: {disk}, redis_urls: ['{redis_url}']}}")
    answers = [
        kite_pool("stats", "--disk", disk, "--redis-url-file", secret, "--json"),
        kite_pool("stats", "--config", config, "--json"),
    ]
    monkeypatch.setenv("KITE_REDIS_URL", redis_url)
    answers.append(kite_pool("stats", "--disk", disk, "--json"))
    for code, out, err in answers:
        tiers = json.loads(out)["tiers"]
        assert (code, err) == (0, "")
        assert [(tier["tier"], tier["items"], tier["problem"]) for tier in tiers] == [("disk", 5, ""), ("redis", 4, "")]
        assert {each["epoch"] for each in tiers[1]["groups"]} == {5}


def test_a_store_without_a_listing_is_told(kite_pool: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitelib.stores.registry.open_stores", lambda config: [("plain", MemoryStore(1000))])
    assert kite_pool("stats", "--store", "plain://x") == (1, "plain: this kind of store has no listing\n", "")


def test_every_command_works_on_s3(kite_pool: Run, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3_server.new_url()
    options = s3_server.options()
    for name, variable in (
        ("endpoint", "AWS_ENDPOINT_URL"),
        ("allow_http", "AWS_ALLOW_HTTP"),
        ("region", "AWS_REGION"),
        ("access_key_id", "AWS_ACCESS_KEY_ID"),
        ("secret_access_key", "AWS_SECRET_ACCESS_KEY"),
    ):
        monkeypatch.setenv(variable, options[name])
    units = units_of(TOKENS, epoch=1)
    damaged = kv_unit([7, *TOKENS], 0, 4)
    filled(lambda: S3Store(url, options=options), [*map(entry, units), (key_of(damaged), b"junk")], **{MODEL: 2})
    (tier,) = json.loads(kite_pool("stats", "--s3", url, "--json")[1])["tiers"]
    assert (tier["tier"], tier["problem"], tier["items"]) == ("s3", "", 5)
    assert {each["epoch"] for each in tier["groups"]} == {2}
    listed = json.loads(kite_pool("ls", "--s3", url, "--json")[1])["units"]
    assert {(unit["key"], unit["epoch"]) for unit in listed} == {
        *((key_of(unit), 1) for unit in units),
        (key_of(damaged), None),
    }
    assert kite_pool("get", units[0].cf.hex(), "--s3", url)[0] == 0
    code, out, _ = kite_pool("verify", "--s3", url, "--fix")
    assert (code, out.endswith("s3: 5 units checked, 1 bad, 1 deleted\n")) == (0, True)
    assert kite_pool("evict", "--freshness", "--s3", url)[1].startswith("s3: 4 units (")
    assert json.loads(kite_pool("stats", "--s3", url, "--json")[1])["tiers"][0]["items"] == 0


# ls


def test_ls_lists_what_a_person_wants_to_know(kite_pool: Run, disk: Path) -> None:
    code, out, err = kite_pool("ls", "--disk", disk, "--kind", "logits")
    assert (code, err) == (0, "")
    header, _, row = out.splitlines()
    assert header.split() == ["cf", "kind", "model", "tokens", "bytes", "epoch", "age", "idle", "tier"]
    assert row.split()[:4] == [logits_unit(TOKENS).cf.hex()[:16], "logits", MODEL, "1"]
    assert row.split()[-1] == "disk"


def test_ls_as_json_has_every_key(kite_pool: Run, disk: Path) -> None:
    units = json.loads(kite_pool("ls", "--disk", disk, "--json")[1])["units"]
    assert {unit["key"] for unit in units} == {key_of(unit) for unit in units_of(TOKENS)} | {
        key_of(of_model(kv_unit(TOKENS, 0, 4), b"n"))
    }
    assert {unit["epoch"] for unit in units if unit["model"] == MODEL} == {1}
    assert {unit["data_bytes"] for unit in units} == {96, 24, 40}


def test_ls_sorts_limits_and_filters(kite_pool: Run, disk: Path) -> None:
    def listed(*options: Any) -> list[dict[str, Any]]:
        return json.loads(kite_pool("ls", "--disk", disk, "--json", *options)[1])["units"]

    sizes = [unit["bytes"] for unit in listed("--sort", "size")]
    assert sizes == sorted(sizes, reverse=True)
    assert [unit["bytes"] for unit in listed("--sort", "size", "--limit", 2)] == sizes[:2]
    assert len(listed("--limit", 0)) == 5
    assert [unit["model"] for unit in listed("--model", "6e")] == [OTHER]
    oldest = key_of(logits_unit(TOKENS))
    for path in (disk / "values").rglob("*.ru"):
        if oldest.rpartition(":")[2] in path.name and "logits" in path.name:
            os.utime(path, (1e9, 1e9))
    assert listed("--sort", "written")[-1]["key"] == oldest
    assert listed("--sort", "used")[-1]["key"] == oldest
    assert [unit["key"] for unit in listed("--older-than", "1h")] == [oldest]
    assert [unit["key"] for unit in listed("--idle", "2d")] == [oldest]


def test_a_name_in_a_shared_store_cannot_steer_the_terminal(kite_pool: Run, disk: Path) -> None:
    filled(disk_at(disk), [("kite:\x1b[2Jgone", b"no unit")])
    for command in (["ls"], ["stats"], ["verify"]):
        out = kite_pool(*command, "--disk", disk)[1]
        assert "\x1b" not in out
    assert "kite:?[2Jgone" in kite_pool("ls", "--disk", disk)[1]
    units = json.loads(kite_pool("ls", "--disk", disk, "--json")[1])["units"]
    assert [unit["kind"] for unit in units if "gone" in unit["key"]] == [None]


# get


def test_get_shows_all_units_of_a_fingerprint_and_checks_them(kite_pool: Run, disk: Path) -> None:
    unit = logits_unit(TOKENS)
    code, out, err = kite_pool("get", unit.cf.hex()[:12].upper(), "--disk", disk)
    assert (code, err) == (0, "")
    assert out.count("check        good") == 2  # the prompt's tail has KV and logits
    for line in (f"cf           {unit.cf.hex()}", "kind         logits", "token_ids    9", "codec        raw/none"):
        assert line in out


def test_get_as_json(kite_pool: Run, disk: Path) -> None:
    unit = logits_unit(TOKENS)
    units = json.loads(kite_pool("get", unit.cf.hex(), "--disk", disk, "--kind", "logits", "--json")[1])
    assert [(each["tier"], each["token_ids"], each["shape"], each["problem"]) for each in units] == [
        ("disk", [9], [10], "")
    ]


def test_get_writes_the_stored_bytes(kite_pool: Run, disk: Path, tmp_path: Path) -> None:
    unit = logits_unit(TOKENS, epoch=1)
    out = tmp_path / "unit.ru"
    code, _, err = kite_pool("get", unit.cf.hex(), "--disk", disk, "--out", out)
    assert code == 2
    assert "choose one of: --kind kv --model" in err
    assert kite_pool("get", unit.cf.hex(), "--disk", disk, "--kind", "logits", "--out", out)[0] == 0
    assert out.read_bytes() == entry(unit)[1]
    code, _, err = kite_pool("get", unit.cf.hex(), "--disk", disk, "--kind", "logits", "--out", out)
    assert (code, "exists; give another name" in err) == (2, True)


def test_get_of_what_is_not_there(kite_pool: Run, disk: Path) -> None:
    code, out, err = kite_pool("get", "0" * 8, "--disk", disk)
    assert (code, out) == (1, "")
    assert err == "kite: no unit has a fingerprint that starts with 00000000; `kite pool ls` lists units\n"


def test_get_of_a_start_that_several_have(kite_pool: Run, tmp_path: Path) -> None:
    cfs = ["ab" * 31 + "01", "ab" * 31 + "02"]
    filled(disk_at(tmp_path / "pool"), [(f"kite:{{abab}}:{MODEL}:kv:{cf}", b"x") for cf in cfs])
    code, out, err = kite_pool("get", "ab" * 4, "--disk", tmp_path / "pool")
    assert (code, out) == (2, "")
    assert f"such as {cfs[0]}, {cfs[1]}; give more digits" in err


def test_get_says_what_is_wrong_with_a_damaged_unit(kite_pool: Run, tmp_path: Path) -> None:
    unit = kv_unit(TOKENS, 0, 4)
    key, value = entry(unit)
    filled(disk_at(tmp_path / "pool"), [(key, value[:-1] + b"!")])
    code, out, _ = kite_pool("get", unit.cf.hex(), "--disk", tmp_path / "pool")
    assert code == 1
    assert "check        BAD: the payload's checksum does not match" in out


# Options


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", "--older-than", "soon"], "'soon' is no time; give a number and s, m, h, d or w, like 7d"),
        (["ls", "--idle", "0s"], "'0s' is no time"),
        (["ls", "--model", "llama"], "'llama' is not the start of a model's key"),
        (["ls", "--model", ""], "'' is not the start of a model's key"),
        (["ls", "--limit", "-1"], "--limit"),
        (["get", "abc"], "'abc' is no fingerprint; give its first 8 to 64 hexadecimal digits"),
        (["stats", "--config", "none.yaml"], "kite: there is no configuration file at 'none.yaml'"),
        (["stats", "--config", "a", "--disk", "b"], "kite: --config names the tiers already; leave out --disk"),
        (["stats", "--redis", "redis://a", "--redis-url-file", "b"], "kite: --redis and --redis-url-file are both"),
        (["stats", "--redis-url-file", "none"], "kite: the file 'none' of --redis-url-file can't be read: No such"),
        (["stats", "--redis", "http://:hunter2@a"], "kite: "),
        (["stats", "--disk", "none"], "kite: no shared tier is named; give --disk, --redis"),
        ([], "ACTION"),
    ],
)
def test_a_wrong_option_is_told_in_one_sentence(kite_pool: Run, arguments: list[str], words: str) -> None:
    code, out, err = kite_pool(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err
    assert "hunter2" not in err


def test_a_memory_pool_has_nothing_to_look_at(kite_pool: Run, tmp_path: Path) -> None:
    config = tmp_path / "kite.yaml"
    config.write_text("ru_pool: {backend: memory}")
    assert kite_pool("stats", "--config", config)[0] == 2


def test_it_works_as_a_process(kite: Callable[..., subprocess.CompletedProcess[str]], disk: Path) -> None:
    done = kite("pool", "stats", "--disk", str(disk))
    assert (done.returncode, done.stderr) == (0, "")
    assert "disk: 5 units of " in done.stdout
