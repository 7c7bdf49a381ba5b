"""From a pool's configuration to its stores, those of other packages included."""

import subprocess
import sys

import pytest

from kitelib.config import PoolConfig
from kitelib.errors import ConfigError, MissingExtraError
from kitelib.stores.disk import DiskStore
from kitelib.stores.memory import MemoryStore
from kitelib.stores.redis import RedisStore
from kitelib.stores.registry import open_stores
from kitelib.stores.s3 import S3Store
from tests.support.installed import install

GOOD = """
from kitelib.stores.memory import MemoryStore

def open_store(url, config):
    store = MemoryStore(1000)
    store.url, store.config = url, config
    return store
"""


@pytest.fixture
def put_package(monkeypatch, tmp_path):
    def put(name, code, *schemes):
        module = name.replace("-", "_")
        monkeypatch.delitem(sys.modules, module, raising=False)
        install(monkeypatch, tmp_path / name, name, dict.fromkeys(schemes, f"{module}:open_store"), code)

    yield put
    for name in [name for name in sys.modules if name.startswith("kite_test_")]:
        del sys.modules[name]


def test_an_empty_configuration_has_no_stores():
    assert open_stores(PoolConfig()) == []


def test_stores_come_fastest_first_and_the_archive_last(put_package, tmp_path):
    put_package("kite-test-good", GOOD, "good", "redis-like")
    config = PoolConfig(
        disk=str(tmp_path / "disk"),
        redis="redis://127.0.0.1:1",
        stores=("good://one", "redis-like://x", "good://two", "good://three"),
        s3="s3://bucket/prefix",
    )
    stores = open_stores(config)
    assert [name for name, _ in stores] == ["disk", "redis", "good", "redis-like", "good-2", "good-3", "s3"]
    kinds = [type(store) for _, store in stores]
    assert kinds == [DiskStore, RedisStore, MemoryStore, MemoryStore, MemoryStore, MemoryStore, S3Store]
    assert [store.url for _, store in stores[2:6]] == list(config.stores)
    assert stores[2][1].config is config
    assert not (tmp_path / "disk").exists(), "building the stores opens nothing"


def test_a_package_can_not_take_the_name_of_a_tier(put_package):
    put_package("kite-test-good", GOOD, "memory")
    assert [name for name, _ in open_stores(PoolConfig(stores=("memory://",)))] == ["memory-2"]


def test_an_unknown_scheme_names_those_there_are(put_package):
    put_package("kite-test-good", GOOD, "good")
    with pytest.raises(ConfigError, match=r"stores\[1\].*'goood'.*known are .*good.*redis\+cluster.*s3"):
        open_stores(PoolConfig(stores=("good://x", "goood://user:geheim@x")))


@pytest.mark.parametrize("url", ["plain", "", "//host", "http://[broken"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match=r"PoolConfig.stores\[0\] is no URL"):
        open_stores(PoolConfig(stores=(url,)))


@pytest.mark.parametrize(("url", "field"), [("redis://x", "PoolConfig.redis"), ("s3://abc", "PoolConfig.s3")])
def test_own_schemes_have_their_own_fields(url, field):
    with pytest.raises(ConfigError, match=field):
        open_stores(PoolConfig(stores=(url,)))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import a_module_that_is_not_there", "ModuleNotFoundError.*a_module_that_is_not_there"),
        ("raise RuntimeError('at import')", "RuntimeError: at import"),
        ("", "AttributeError"),
        ("def open_store(url, config): raise OSError('no luck with ' + url)", "no luck with bad://..."),
        ("def open_store(url, config): raise OSError('geheim is wrong')", r"\*\*\* is wrong"),
        ("def open_store(url, config): return None", "gave a NoneType, which is no"),
        ("def open_store(url, config): return dict()", "gave a dict, which is no"),
        (
            "from kitelib.stores.memory import MemoryStore\ndef open_store(url, config): return MemoryStore",
            "gave a type",
        ),
    ],
)
def test_a_package_that_fails_is_named(put_package, code, reason):
    put_package("kite-test-bad", code, "bad")
    with pytest.raises(ConfigError, match=rf"PoolConfig.stores\[0\].*'kite-test-bad'.*{reason}") as caught:
        open_stores(PoolConfig(stores=("bad://ada:geheim@host/?token=abcdef",)))
    assert "geheim" not in str(caught.value)
    assert "abcdef" not in str(caught.value)


def test_a_package_may_say_what_is_wrong_with_the_url(put_package):
    code = """
from kitelib.errors import ConfigError, MissingExtraError

def open_store(url, config):
    if "extra" in url:
        raise MissingExtraError("thing", "thing", "this store")
    raise ConfigError("give a port, not " + url)
"""
    put_package("kite-test-picky", code, "picky")
    with pytest.raises(ConfigError, match=r"PoolConfig.stores\[0\]: give a port, not picky://..."):
        open_stores(PoolConfig(stores=("picky://ada:geheim@host",)))
    with pytest.raises(MissingExtraError):
        open_stores(PoolConfig(stores=("picky://extra",)))


def test_two_packages_with_one_scheme_are_both_named(put_package):
    put_package("kite-test-one", GOOD, "same")
    put_package("kite-test-two", GOOD, "same")
    with pytest.raises(ConfigError, match="several packages register: kite-test-one, kite-test-two"):
        open_stores(PoolConfig(stores=("same://x",)))


def test_errors_name_the_field_and_show_no_password():
    with pytest.raises(ConfigError, match=r"PoolConfig.s3: .*holds more than") as caught:
        open_stores(PoolConfig(s3="s3://ada:geheim@bucket"))
    assert "geheim" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"PoolConfig.redis: ") as caught:
        open_stores(PoolConfig(redis="nonsense://ada:geheim@host"))
    assert "geheim" not in str(caught.value)
    with pytest.raises(ConfigError, match="s3_options is given, but PoolConfig.s3 is None"):
        open_stores(PoolConfig(s3_options={"region": "eu-north-1"}))


@pytest.mark.parametrize(
    ("module", "extra", "config"), [("obstore", "s3", "s3='s3://abc'"), ("redis", "redis", "redis='redis://h'")]
)
def test_a_missing_extra_is_named(module, extra, config):
    code = f"""
import importlib.machinery, sys

class Hidden(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == {module!r} else super().find_spec(name, path, target)

sys.meta_path = [Hidden if each is importlib.machinery.PathFinder else each for each in sys.meta_path]
from kitelib.config import PoolConfig
from kitelib.errors import MissingExtraError
from kitelib.stores.registry import open_stores
try:
    open_stores(PoolConfig({config}))
except MissingExtraError as error:
    print(error.extra, "pip install" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [extra, "True"]


def test_nothing_of_a_store_is_loaded_unasked():
    code = """
import sys
from kitelib.config import PoolConfig
from kitelib.stores.registry import open_stores
open_stores(PoolConfig(disk="/nowhere", s3="s3://bucket"))
print([name for name in ("obstore", "redis") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
