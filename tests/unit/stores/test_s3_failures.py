"""What goes wrong between the S3 store and its server costs misses and counts, never a wrong value or a hang."""

import itertools
import random
import socket
import time
import traceback

import anyio
import pytest

from kitelib.errors import StoreError
from kitelib.fingerprint import store_key
from kitelib.stores.s3 import S3Store, client


def key(number):
    return store_key("0123456789abcdef", "kv", random.Random(number).randbytes(32))


@pytest.fixture
def proxy(s3_proxy):
    return s3_proxy()


@pytest.fixture
def make(s3_server, proxy, monkeypatch):
    """Stores that lose patience soon, so that tests needn't wait."""
    monkeypatch.setattr(client, "MIN_CONNECT_S", 0.3)
    monkeypatch.setattr(client, "MIN_READ_S", 0.4)

    def make_one(url=None, **options):
        given = s3_server.options(endpoint=proxy.endpoint) | options
        return S3Store(s3_server.new_url() if url is None else url, options=given)

    return make_one


@pytest.fixture
async def filled(make, proxy):
    store = make()
    await store.put_many([(key(number), b"%d" % number * 2000) for number in range(6)])
    proxy.requests.clear()
    return store


VALUES = [b"%d" % number * 2000 for number in range(6)]
KEYS = [key(number) for number in range(6)]


@pytest.mark.parametrize("fault", ["500", "503", "drop", "hang"])
async def test_a_failed_read_is_tried_again(filled, proxy, fault):
    proxy.faults.extend([fault, fault])
    assert await filled.get_many(KEYS[:1]) == VALUES[:1]
    assert len(proxy.requests) == 3
    assert (await filled.stats()).errors == 0


@pytest.mark.parametrize("fault", ["500", "503", "drop"])
async def test_a_failed_write_is_tried_again(make, proxy, fault):
    store = make()
    proxy.faults.extend([fault, fault])
    await store.put_many([(KEYS[0], VALUES[0])])
    assert [request.method for request in proxy.requests] == ["PUT"] * 3
    assert await store.get_many(KEYS[:1]) == VALUES[:1]
    stats = await store.stats()
    assert (stats.errors, stats.dropped) == (0, 0)


async def test_a_body_that_breaks_off_is_read_on_or_missed(filled, proxy):
    """B7, B31: half a body is never a value."""
    proxy.faults.append("truncate")
    assert await filled.get_many(KEYS[:1]) == VALUES[:1]
    proxy.only, proxy.always = "GET", "truncate"
    with pytest.raises(StoreError):
        await filled.get_many(KEYS[:1])
    proxy.always = None
    assert await filled.get_many(KEYS[:1]) == VALUES[:1]


@pytest.mark.parametrize("fault", ["500", "hang"])
async def test_what_can_not_be_read_is_a_miss_and_counted(filled, proxy, fault):
    """B7: a read that fails is a miss for its key, and leaves the other keys alone."""
    proxy.bad_paths.append(key(2)[-64:])
    proxy.bad = fault
    assert await filled.get_many(KEYS) == [*VALUES[:2], None, *VALUES[3:]]
    assert await filled.get_heads(KEYS, 1) == [b"0", b"1", None, b"3", b"4", b"5"]
    assert await filled.leading_run(KEYS) == 2
    assert await filled.delete_many(KEYS[:3]) == 2
    proxy.bad_paths.clear()
    stats = await filled.stats()
    assert (stats.errors, stats.items) == (4, 3)


async def test_what_can_not_be_written_is_dropped_and_counted(make, proxy):
    """B4: a write that fails is told, and its key has no value afterwards."""
    store = make()
    proxy.bad_paths.append(key(2)[-64:])
    proxy.bad = "500"
    await store.put_many(list(zip(KEYS, VALUES, strict=True)))
    proxy.bad_paths.clear()
    stats = await store.stats()
    assert (stats.errors, stats.dropped, stats.items) == (1, 1, 5)
    assert await store.get_many(KEYS) == [*VALUES[:2], None, *VALUES[3:]]


async def test_a_long_run_is_counted_as_far_as_the_server_answers(make, proxy):
    store = make()
    keys = [key(number) for number in range(20)]
    await store.put_many([(each, b"x") for each in keys])
    proxy.only, proxy.always = "HEAD", "500"
    proxy.faults.extend([None] * 16)
    assert await store.leading_run(keys) == 16


CALLS = {
    "get_many": lambda store: store.get_many(KEYS),
    "put_many": lambda store: store.put_many(list(zip(KEYS, VALUES, strict=True))),
    "leading_run": lambda store: store.leading_run(KEYS),
    "delete_many": lambda store: store.delete_many(KEYS),
    "get_heads": lambda store: store.get_heads(KEYS, 10),
    "warm": lambda store: store.warm(),
    "stats": lambda store: store.stats(),
    "get_epoch": lambda store: store.get_epoch("model"),
    "raise_epoch": lambda store: store.raise_epoch("model", 1),
    "list_items": lambda store: anext(aiter(store.list_items())),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_can_do_nothing_is_a_store_error(filled, proxy, call):
    proxy.always = "500"
    with pytest.raises(StoreError, match=r"of S3Store\('s3://kite-tests/.*failed: .*"):
        await CALLS[call](filled)
    proxy.always = None
    assert await filled.get_many(KEYS) == VALUES, "the store works again when the server does"


@pytest.mark.parametrize("call", ["get_many", "put_many", "list_items", "raise_epoch"])
async def test_a_server_that_hangs_holds_nobody_for_ever(filled, proxy, call):
    proxy.always = "hang"
    with anyio.fail_after(30), pytest.raises(StoreError):
        await CALLS[call](filled)


async def test_a_server_that_hangs_is_given_up_all_at_once(filled, proxy):
    """B27, B29: patience is per call, not per key, so a long call takes no longer than a short one."""
    proxy.always = "hang"
    keys = [key(number) for number in range(400)]
    with pytest.raises(StoreError, match="no answer for|retries|sending"):
        await filled.get_many(keys)
    assert len(proxy.requests) < 250, "most of the keys were never asked for"
    assert filled._errors == 400


async def test_no_server_is_a_store_error(make, proxy):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        store = make(endpoint=f"http://127.0.0.1:{unused.getsockname()[1]}")
        for call in ("get_many", "put_many", "warm", "raise_epoch"):
            with pytest.raises(StoreError):
                await CALLS[call](store)


async def test_a_bucket_that_does_not_exist_is_no_miss(make):
    store = make("s3://no-such-bucket/x")
    for call in ("get_many", "put_many", "warm", "list_items"):
        with pytest.raises(StoreError, match="NoSuchBucket"):
            await CALLS[call](store)


async def test_errors_show_no_credentials(filled, proxy, make):
    """What a server echoes (some send back the request, with its token) is not passed on."""
    store = make(session_token="geheim-token", access_key_id="GEHEIM-ID", secret_access_key="geheim-key")
    proxy.always = "echo"
    for call in ("get_many", "put_many", "get_epoch"):
        with pytest.raises(StoreError, match="BadToken, no good") as caught:
            await CALLS[call](store)
        shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
        assert "geheim" not in shown.lower()
    assert proxy.requests[-1].headers["x-amz-security-token"] == "geheim-token"


async def test_the_waits_between_tries_grow_and_differ(filled, proxy, monkeypatch):
    """Clients that failed together must not come back together."""
    arrivals = []
    fault_of = proxy.fault_of

    def note(request):
        arrivals.append(time.monotonic())
        return fault_of(request)

    monkeypatch.setattr(proxy, "fault_of", note)
    waits = []
    for _ in range(6):
        arrivals.clear()
        proxy.faults.extend(["503", "503"])
        assert await filled.get_many(KEYS[:1]) == VALUES[:1]
        waits.append([round(later - earlier, 3) for earlier, later in itertools.pairwise(arrivals)])
    assert min(first for first, _ in waits) >= 0.025
    assert len({second for _, second in waits}) > 2
