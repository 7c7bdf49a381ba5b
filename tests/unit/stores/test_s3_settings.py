"""URL and options of the S3 store: checked before anything is opened, and never shown where they are secret."""

import pytest

from kitelib.errors import ConfigError
from kitelib.stores.s3 import S3Store
from kitelib.stores.s3.client import _CONFIG, MIN_CONNECT_S, MIN_READ_S, parse_settings, sentence


@pytest.fixture(autouse=True)
def no_aws_variables(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("url", "bucket", "root"), [("s3://abc", "abc", "v1"), ("s3://a-b.c/x/y/", "a-b.c", "x/y/v1")])
def test_the_url_names_bucket_and_prefix(url, bucket, root):
    settings = parse_settings(url, {}, 0.5, 0.3)
    assert (settings.bucket, settings.root) == (bucket, root)


@pytest.mark.parametrize(
    "url",
    [
        "abc",
        "https://abc/x",
        "s3:///x",
        "s3://ab",
        "s3://a_b!/x",
        "s3://abc/a b",
        "s3://abc/../x",
        "s3://abc/x?y=geheim",
        "s3://abc/x#y",
        "s3://key:geheim@abc/x",
        "s3://abc/" + "x/" * 200,
        "s3://[abc",
    ],
)
def test_a_wrong_url_is_refused_without_showing_secrets(url):
    with pytest.raises(ConfigError, match="the URL of the S3 store") as caught:
        S3Store(url)
    assert "geheim" not in str(caught.value)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ConfigError, match="no option 'acess_key'; did you mean 'access_key_id'"):
        S3Store("s3://abc", options={"acess_key": "geheim"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"region": 3}, "'region' is of type int"),
        ({"allow_http": "maybe"}, "'allow_http' is 'maybe'; give 'true' or 'false'"),
        ({"endpoint": "https://a", "aws_endpoint_url": "https://b"}, "'endpoint' is given twice"),
        ({"endpoint": "minio:9000"}, "'endpoint' is no endpoint"),
        ({"endpoint": "https://user:geheim@minio"}, "'endpoint' is no endpoint"),
        ({"bucket": "abc"}, "no option 'bucket'"),
        ({"access_key_id": "geheim"}, "'access_key_id' is given without 'secret_access_key'"),
        ({"secret_access_key": "geheim"}, "'secret_access_key' is given without 'access_key_id'"),
    ],
)
def test_a_wrong_option_is_refused(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        S3Store("s3://abc", options=options)
    assert "geheim" not in str(caught.value)


def test_plain_http_is_refused_unless_it_is_allowed(monkeypatch):
    """B33: TLS is on by default, and only an explicit option turns it off."""
    endpoint = {"endpoint": "http://minio:9000"}
    for more in ({}, {"allow_http": "false"}):
        with pytest.raises(ConfigError, match=r"'http://minio:9000': plain http.*allow_http to 'true'"):
            S3Store("s3://abc", options=endpoint | more)
    S3Store("s3://abc", options=endpoint | {"allow_http": "true"})
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        with monkeypatch.context() as context:
            context.setenv(name, "http://minio:9000")
            with pytest.raises(ConfigError, match=f"the variable {name} is .*plain http"):
                S3Store("s3://abc")
            S3Store("s3://abc", options={"endpoint": "https://minio:9000"})
            context.setenv("AWS_ALLOW_HTTP", "true")
            S3Store("s3://abc")
            with pytest.raises(ConfigError, match="plain http"):
                S3Store("s3://abc", options={"allow_http": "false"})


def test_an_endpoint_that_is_given_beats_the_variable_that_the_client_prefers(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://elsewhere")
    settings = parse_settings("s3://abc", {"endpoint": "https://here"}, 0.5, 0.3)
    assert settings.config["aws_endpoint_url_s3"] == "https://here"


def test_timeouts_have_floors_that_suit_s3():
    settings = parse_settings("s3://abc", {}, 0.5, 0.3)
    assert (settings.connect_s, settings.read_s) == (MIN_CONNECT_S, MIN_READ_S)
    settings = parse_settings("s3://abc", {}, 5.0, 7.0)
    assert (settings.connect_s, settings.read_s) == (5.0, 7.0)


@pytest.mark.parametrize("name", _CONFIG)
def test_every_option_is_one_that_the_client_has(name):
    import obstore.store

    value = {"request_payer": "true", "checksum_algorithm": "sha256", "server_side_encryption": "AES256"}.get(name)
    obstore.store.S3Store("bucket", config={"access_key_id": "a", "secret_access_key": "b"} | {name: value or "false"})


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("nan")])
def test_a_time_to_live_must_be_positive(ttl_s):
    with pytest.raises(ConfigError, match="ttl_s is"):
        S3Store("s3://abc", ttl_s=ttl_s)


def test_no_repr_shows_a_credential(monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "geheim-3")
    options = {"access_key_id": "geheim-1", "secret_access_key": "geheim-2", "proxy_url": "http://u:geheim-4@p"}
    store = S3Store("s3://abc/x", options=options)
    assert repr(store) == "S3Store('s3://abc/x')"
    assert "geheim" not in repr(store) + repr(store._settings)


def test_what_a_server_echoes_is_left_out_of_messages(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "geheim-2")
    settings = parse_settings("s3://abc", {"access_key_id": "geheim-1"}, 0.5, 0.3)
    body = "<Error><Code>ExpiredToken</Code><Message>The geheim-1 token</Message><Token-0>other</Token-0></Error>"
    text = f"GET http://u:other@host/a failed with geheim-2: 400: {body}\n\nDebug source:\n other {body}"
    assert sentence(OSError(text), settings) == ("ExpiredToken, The *** token (GET http://host/a failed with ***: 400)")


async def test_a_file_of_certificates_that_is_not_there_is_named():
    from kitelib.errors import StoreError

    store = S3Store("s3://abc", options={"ca_bundle": "/nowhere/ca.pem"})
    with pytest.raises(StoreError, match="certificates in '/nowhere/ca.pem' can't be read"):
        await store.warm()
