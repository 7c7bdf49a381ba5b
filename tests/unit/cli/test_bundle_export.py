"""`kite bundle export`: from the pool of a fleet to a bundle, without a model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kitelib.abc import SharedStore
from kitelib.fingerprint import model_key
from kitelib.stores.keys import unit_key
from kitelib.stores.redis import RedisStore
from kitelib.stores.s3 import S3Store
from kitelib.upcycle.bundle.reader import Bundle
from tests.support.hits import MODEL, OWN, fill_pool, prompt_units, publish, root_of, today
from tests.support.pools import disk_at, entry, key_of, with_store
from tests.support.redis_servers import RedisServer, free_port
from tests.support.s3_server import S3Server
from tests.support.units import INFO, chain_of

Run = Callable[..., tuple[int, str, str]]

FIRST, SECOND = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 20, 21]
PROMPTS = [(FIRST, 120), (SECOND, 30)]


@pytest.fixture
def export(kite_here: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """``export("--top", 5, ...)``, with an empty folder as the user's cache, into ``hot.kite``."""
    monkeypatch.delenv("KITE_REDIS_URL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda *options: kite_here("bundle", "export", "-o", tmp_path / "hot.kite", *options)


def fill(
    make: Callable[[], SharedStore], prompts: Sequence[tuple[list[int], int]] = PROMPTS, **options: object
) -> None:
    with_store(make, lambda store: fill_pool(store, prompts, **options))  # type: ignore[arg-type]


def keys_in(path: Path, **options: bytes) -> set[str]:
    with Bundle.open(path, **options) as bundle:
        assert bundle.check() == []
        return set(bundle.keys)


def keys_of(*prompts: Sequence[int], root: bytes = OWN) -> set[str]:
    return {key_of(unit) for tokens in prompts for unit in prompt_units(tokens, root=root)}


def test_the_hottest_units_of_a_folder(export: Run, tmp_path: Path) -> None:
    fill(disk_at(tmp_path / "pool"))
    code, out, errors = export("--from-pool", tmp_path / "pool", "--min-hits", 100)
    assert (code, errors) == (0, "")
    assert keys_in(tmp_path / "hot.kite") == keys_of(FIRST)
    assert "3 kv" in out
    assert f"{MODEL}, epoch 0" in out
    assert "at least 120 per block; requests ended in 2 blocks" in out
    assert "refused" not in out


def test_json_has_all_figures(export: Run, tmp_path: Path) -> None:
    fill(disk_at(tmp_path / "pool"))
    url = (tmp_path / "pool").as_uri()
    code, out, _ = export("--from-pool", url, "--json", "--top", 1, "--label", "fleet=cockpit", "--compress", "zstd")
    said = json.loads(out)
    assert code == 0
    assert {name: said[name] for name in ("model", "epoch", "fewest_hits", "leaves", "lost", "refused", "units")} == {
        "model": MODEL,
        "epoch": 0,
        "fewest_hits": 150,
        "leaves": 2,
        "lost": 0,
        "refused": 0,
        "units": {"kv": 1},
    }
    with Bundle.open(tmp_path / "hot.kite") as bundle:
        assert bundle.digest == said["digest"]
        assert bundle.manifest.labels == {"fleet": "cockpit"}


def test_from_redis_by_url_and_by_what_a_command_line_does_not_show(
    export: Run, redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(lambda: RedisStore(redis_server.url))
    (tmp_path / "url").write_text(redis_server.url + "\n")
    for options in (["--from-pool", redis_server.url], ["--redis-url-file", tmp_path / "url"]):
        assert export(*options)[0] == 0
        assert keys_in(tmp_path / "hot.kite") == keys_of(FIRST, SECOND)
        (tmp_path / "hot.kite").unlink()
    monkeypatch.setenv("KITE_REDIS_URL", redis_server.url)
    assert export("--no-completions")[0] == 0
    assert keys_in(tmp_path / "hot.kite") == {key for key in keys_of(FIRST, SECOND) if ":completion:" not in key}


def test_from_a_cluster(export: Run, redis_cluster, tmp_path: Path) -> None:
    fill(lambda: RedisStore(redis_cluster.url))
    assert export("--from-pool", redis_cluster.url)[0] == 0
    assert keys_in(tmp_path / "hot.kite") == keys_of(FIRST, SECOND)


def test_counts_of_redis_and_units_of_the_archive(
    export: Run, redis_server: RedisServer, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 keeps no counts, and says so; with a Redis that does, its units are found."""
    url = s3_server.new_url()
    for name, value in s3_server.options().items():
        monkeypatch.setenv("AWS_ENDPOINT_URL" if name == "endpoint" else f"AWS_{name.upper()}", value)
    with_store(
        lambda: S3Store(url, options=s3_server.options()),
        lambda store: store.put_many([entry(unit) for unit in prompt_units(FIRST)]),
    )
    code, _, errors = export("--from-pool", url)
    assert code == 2
    assert "s3 keeps no counts of hits; name the Redis or the disk folder of the same engines as well" in errors
    with_store(lambda: RedisStore(redis_server.url), lambda store: publish(store, {chain_of(FIRST, OWN).end(): 3}))
    assert export("--s3", url, "--redis", redis_server.url)[0] == 0
    assert keys_in(tmp_path / "hot.kite") == keys_of(FIRST)


def test_only_the_days_that_were_asked_for(export: Run, tmp_path: Path) -> None:
    fill(disk_at(tmp_path / "pool"), [(FIRST, 120)])
    make = disk_at(tmp_path / "pool")
    with_store(make, lambda store: store.put_many([entry(unit) for unit in prompt_units(SECOND)]))
    with_store(make, lambda store: publish(store, {chain_of(SECOND, OWN).end(): 9}, day=today() - 3))
    assert export("--disk", tmp_path / "pool", "--days", 2)[0] == 0
    assert keys_in(tmp_path / "hot.kite") == keys_of(FIRST)
    assert export("--disk", tmp_path / "pool", "--days", 5)[0] == 0
    assert keys_in(tmp_path / "hot.kite") == keys_of(FIRST, SECOND)


def test_tenants_with_their_own_keys(export: Run, tmp_path: Path) -> None:
    key, secret = b"k" * 16, b"s" * 16
    (tmp_path / "key").write_bytes(key)
    (tmp_path / "secret").write_bytes(secret)
    own, tenant = root_of(None, secret), root_of("tenant", secret)
    make = disk_at(tmp_path / "pool")
    fill(make, PROMPTS[:1], root=own, hmac_key=unit_key(key, None, secret))
    fill(make, PROMPTS[1:], root=tenant, hmac_key=unit_key(key, "tenant", secret))
    with_store(make, lambda store: publish(store, {}, root=tenant, namespace="tenant", private=True))
    common = ("--from-pool", tmp_path / "pool", "--namespace-secret-file", tmp_path / "secret")
    assert export(*common, "--hmac-key-file", tmp_path / "key")[0] == 0
    assert keys_in(tmp_path / "hot.kite", hmac_key=key) == keys_of(FIRST, root=own)
    assert export(*common, "--hmac-key-file", tmp_path / "key", "--namespace", "tenant")[0] == 0
    assert keys_in(tmp_path / "hot.kite", hmac_key=key) == keys_of(FIRST, root=own) | keys_of(SECOND, root=tenant)
    code, _, errors = export("--from-pool", tmp_path / "pool")
    assert code == 2
    assert "none in the namespaces that were asked for" in errors


def test_a_namespace_that_nobody_has_is_named(export: Run, tmp_path: Path) -> None:
    fill(disk_at(tmp_path / "pool"))
    code, out, _ = export("--from-pool", tmp_path / "pool", "--namespace", "nobody")
    assert code == 0
    assert "unknown    namespaces without a unit in the pool, with this namespace secret: 'nobody'" in out
    _, out, _ = export("--from-pool", tmp_path / "pool", "--namespace", "nobody", "--json")
    assert json.loads(out)["unknown_namespaces"] == ["nobody"]
    assert "unknown" not in export("--from-pool", tmp_path / "pool")[1]


def test_a_configuration_file_brings_its_keys(export: Run, tmp_path: Path) -> None:
    fill(disk_at(tmp_path / "pool"))
    (tmp_path / "kite.yaml").write_text(f"ru_pool: {{backend: disk, disk_path: {tmp_path / 'pool'}}}\n")
    assert export("--config", tmp_path / "kite.yaml")[0] == 0
    assert keys_in(tmp_path / "hot.kite") == keys_of(FIRST, SECOND)


def test_one_of_several_models(export: Run, tmp_path: Path) -> None:
    other = dataclasses.replace(INFO, name="the \x1b[31mother", model_state=b"n" * 32)
    fill(disk_at(tmp_path / "pool"))
    with_store(disk_at(tmp_path / "pool"), lambda store: publish(store, {b"1" * 32: 5}, info=other))
    code, _, errors = export("--from-pool", tmp_path / "pool")
    assert code == 2
    assert "the pool has 2 models; choose one with --model-state DIGITS" in errors
    assert f"{MODEL} (test)" in errors
    assert model_key(other.model_state) in errors
    assert "\x1b" not in errors
    assert export("--from-pool", tmp_path / "pool", "--model-state", INFO.model_state.hex().upper())[0] == 0
    assert keys_in(tmp_path / "hot.kite") == keys_of(FIRST, SECOND)
    code, _, errors = export("--from-pool", tmp_path / "pool", "--model-state", "0123")
    assert code == 2
    assert "no model of the pool begins with 0123" in errors


def test_what_was_refused_is_said(export: Run, tmp_path: Path) -> None:
    fill(disk_at(tmp_path / "pool"))
    key, value = entry(prompt_units(FIRST)[1])
    with_store(disk_at(tmp_path / "pool"), lambda store: store.put_many([(key, value[:-1] + b"?")]))
    with_store(disk_at(tmp_path / "pool"), lambda store: store.delete_many([key_of(prompt_units(SECOND)[1])]))
    with_store(disk_at(tmp_path / "pool"), lambda store: store.delete_many(list(keys_of(SECOND) - keys_of(FIRST))))
    code, out, _ = export("--from-pool", tmp_path / "pool")
    assert code == 0
    assert "lost       1 such block whose units are not in the pool any more" in out
    assert "refused    4 units that failed a check" in out
    assert keys_in(tmp_path / "hot.kite") == {key_of(prompt_units(FIRST)[0])}


def test_errors_say_what_to_do(export: Run, tmp_path: Path) -> None:
    code, _, errors = export("--from-pool", tmp_path / "nowhere")
    assert code == 2
    assert "there is no folder" in errors
    assert not (tmp_path / "nowhere").exists()

    with_store(disk_at(tmp_path / "pool"), lambda store: store.put_many([entry(prompt_units(FIRST)[0])]))
    code, _, errors = export("--from-pool", tmp_path / "pool")
    assert code == 2
    assert "the pool has counted no hits; an engine adds its own once a minute" in errors

    fill(disk_at(tmp_path / "pool"))
    code, _, errors = export("--from-pool", tmp_path / "pool", "--min-hits", 1000)
    assert code == 2
    assert "no unit has 1000 hits; the most is 150: lower --min-hits" in errors

    code, _, errors = export("--from-pool", tmp_path / "pool", "--disk", tmp_path / "pool")
    assert code == 2
    assert "--from-pool and --disk are both given" in errors

    code, _, errors = export("--from-pool", f"redis://127.0.0.1:{free_port()}")
    assert code == 1
    assert "can't connect" in errors
    assert not (tmp_path / "hot.kite").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--top", "0"),
        ("--top", "many"),
        ("--min-hits", "0"),
        ("--days", "9"),
        ("--days", "0"),
        ("--model-state", "xyz"),
    ],
)
def test_values_out_of_range_are_refused(export: Run, tmp_path: Path, option: str, value: str) -> None:
    code, _, errors = export("--from-pool", tmp_path, option, value)
    assert code == 2
    assert f"argument {option}" in errors


def test_exporting_leaves_the_pool_as_it_was(export: Run, tmp_path: Path) -> None:
    fill(disk_at(tmp_path / "pool"))

    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in (tmp_path / "pool").rglob("*") if path.is_file()}

    before = content()
    assert export("--from-pool", tmp_path / "pool")[0] == 0
    assert content() == before
