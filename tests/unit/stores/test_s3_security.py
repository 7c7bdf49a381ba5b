"""Credentials and TLS of the S3 store, against servers that check them."""

import boto3
import pytest

from kitelib.errors import StoreError
from kitelib.fingerprint import store_key
from kitelib.stores.s3 import S3Store, client
from tests.support.s3_server import self_signed_certificate, start_s3_server

KEY = store_key("0123456789abcdef", "kv", bytes(32))
POLICY = """{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}"""


@pytest.fixture(autouse=True)
def no_aws_variables(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(client, "MIN_CONNECT_S", 0.5)
    monkeypatch.setattr(client, "MIN_READ_S", 1.0)


@pytest.fixture(scope="module")
def strict_server():
    """A server that knows one user, and checks the signature of every request."""
    with start_s3_server() as server:
        setup = {"endpoint_url": server.endpoint, "region_name": "us-east-1"}
        iam = boto3.client("iam", aws_access_key_id="setup", aws_secret_access_key="setup", **setup)
        iam.create_user(UserName="kite")
        iam.put_user_policy(UserName="kite", PolicyName="all", PolicyDocument=POLICY)
        made = iam.create_access_key(UserName="kite")["AccessKey"]
        iam.close()
        server.call("/moto-api/reset-auth", b"0")
        yield server, {"access_key_id": made["AccessKeyId"], "secret_access_key": made["SecretAccessKey"]}


async def round_trip(store):
    await store.warm()
    await store.put_many([(KEY, b"value" * 1000)])
    assert await store.get_many([KEY]) == [b"value" * 1000]
    assert await store.get_heads([KEY], 5) == [b"value"]
    assert await store.leading_run([KEY]) == 1
    assert await store.raise_epoch("model", 2) == 2
    assert await store.raise_epoch("model", 3) == 3
    assert [item.key async for page in store.list_items() for item in page] == [KEY]
    assert await store.delete_many([KEY]) == 1
    assert (await store.stats()).errors == 0


async def test_every_request_is_signed_with_the_credentials_of_the_options(strict_server):
    """B33: a server that checks AWS signatures accepts all that the store does."""
    server, credentials = strict_server
    await round_trip(S3Store(server.new_url(), options=server.options(**credentials)))


async def test_every_request_is_signed_with_the_credentials_of_the_variables(strict_server, monkeypatch):
    """B33: credentials are not lost when they come from the environment."""
    server, credentials = strict_server
    for name, value in credentials.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    options = {"endpoint": server.endpoint, "allow_http": "true", "region": "us-east-1"}
    await round_trip(S3Store(server.new_url(), options=options))


@pytest.mark.parametrize("wrong", ["access_key_id", "secret_access_key"])
async def test_wrong_credentials_are_a_store_error_that_does_not_show_them(strict_server, wrong):
    server, credentials = strict_server
    mine = credentials | {wrong: "WRONG" + credentials[wrong][5:]}
    store = S3Store(server.new_url(), options=server.options(**mine))
    calls = [store.warm, lambda: store.get_many([KEY]), lambda: store.put_many([(KEY, b"x")]), store.stats]
    for call in calls:
        with pytest.raises(StoreError, match="InvalidAccessKeyId|SignatureDoesNotMatch") as caught:
            await call()
        assert not any(secret in str(caught.value) for secret in mine.values())


@pytest.fixture
def certificate(tmp_path):
    return self_signed_certificate(tmp_path)


async def test_a_certificate_that_nobody_vouches_for_is_refused(s3_server, s3_proxy, certificate):
    """B33: TLS is on and checked."""
    proxy = s3_proxy(certificate)
    store = S3Store(s3_server.new_url(), options=s3_server.options(endpoint=proxy.endpoint, allow_http="false"))
    for call in (store.warm, lambda: store.get_many([KEY]), lambda: store.put_many([(KEY, b"x")])):
        with pytest.raises(StoreError):
            await call()
    assert proxy.requests == []


@pytest.mark.parametrize("how", ["root_certificate", "ca_bundle", "AWS_CA_BUNDLE", "allow_invalid_certificates"])
async def test_a_private_certificate_can_be_trusted(s3_server, s3_proxy, certificate, how, monkeypatch):
    """B33: stores with certificates of their own work without turning TLS off."""
    proxy = s3_proxy(certificate)
    path, _ = certificate
    options = s3_server.options(endpoint=proxy.endpoint)
    del options["allow_http"]
    if how == "AWS_CA_BUNDLE":
        monkeypatch.setenv(how, str(path))
    else:
        values = {"root_certificate": path.read_text(), "ca_bundle": str(path), "allow_invalid_certificates": "true"}
        options[how] = values[how]
    await round_trip(S3Store(s3_server.new_url(), options=options))
    assert proxy.requests
