from __future__ import annotations

import pytest

from kitelib.errors import ConfigError
from kitelib.stores.redis import RedisStore
from kitelib.stores.redis.url import parse_redis_url

SECRET = "hunter2"


def test_a_plain_url_names_host_port_and_database() -> None:
    target = parse_redis_url("redis://cache:7000/3")
    assert (target.kind, target.addresses, target.db, target.tls) == ("standalone", (("cache", 7000),), 3, None)
    assert (target.username, target.password) == (None, None)


def test_user_and_password_are_percent_decoded() -> None:
    target = parse_redis_url("redis://us%40er:p%2Fw%3A%40@cache")
    assert (target.username, target.password, target.addresses) == ("us@er", "p/w:@", (("cache", 6379),))
    assert parse_redis_url("redis://:pw@cache").username is None


def test_a_tls_url_checks_certificates_unless_told_otherwise() -> None:
    tls = parse_redis_url("rediss://cache").tls
    assert tls == {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    tls = parse_redis_url("rediss://cache?ssl_ca_certs=/etc/ca.pem&ssl_check_hostname=false").tls
    assert tls == {"ssl_cert_reqs": "required", "ssl_check_hostname": False, "ssl_ca_certs": "/etc/ca.pem"}


def test_cluster_and_sentinel_urls_name_several_servers() -> None:
    cluster = parse_redis_url("rediss+cluster://u:p@a:1,b:2,[::1]:3")
    assert (cluster.kind, cluster.addresses) == ("cluster", (("a", 1), ("b", 2), ("::1", 3)))
    assert cluster.tls is not None
    sentinel = parse_redis_url("redis+sentinel://u:p@a,b:2/main/4?sentinel_password=s")
    assert (sentinel.kind, sentinel.addresses) == ("sentinel", (("a", 26379), ("b", 2)))
    assert (sentinel.service, sentinel.db, sentinel.sentinel_password) == ("main", 4, "s")


def test_a_unix_url_names_a_path() -> None:
    target = parse_redis_url("unix://u:p@/run/redis.sock?db=2")
    assert (target.addresses, target.db, target.password) == ((("/run/redis.sock", 0),), 2, "p")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://u:{}@cache", "begins with 'http'"),
        ("cache:6379", "begins with '?'"),
        ("redis://u:{}@:6379", "empty host"),
        ("redis://u:{}@cache:99999", "port"),
        ("redis://u:{}@cache:port", "port"),
        ("redis://u:{}@a,b", "redis+cluster://"),
        ("redis://u:{}@cache/one", "database"),
        ("redis://u:{}@cache/1/2", "2 parts"),
        ("redis+cluster://u:{}@cache/1", "only database 0"),
        ("redis+sentinel://u:{}@cache", "no service"),
        ("redis://u:{}@cache?ssl_ca_certs=x", "TLS options need rediss"),
        ("redis://u:{}@cache?password={}", "unknown option 'password'"),
        ("rediss://u:{}@cache?ssl_cert_reqs={}", "ssl_cert_reqs"),
        ("rediss://u:{}@cache?ssl_check_hostname={}", "ssl_check_hostname"),
        ("redis://u:{}#x@cache", "'#'"),
        ("redis://u:{}[@cache", "can't be read"),
        ("unix://u:{}@", "no path"),
    ],
)
def test_a_bad_url_is_refused_by_name_of_the_problem_without_its_secrets(url: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_redis_url(url.replace("{}", SECRET))
    assert problem in str(caught.value)
    assert SECRET not in str(caught.value)


def test_neither_store_nor_target_show_the_password() -> None:
    url = f"rediss+sentinel://user:{SECRET}@a:1,b:2/main/4?sentinel_password={SECRET}&ssl_password={SECRET}"
    shown = repr(RedisStore(url)) + repr(parse_redis_url(url)) + str(parse_redis_url(url))
    assert SECRET not in shown
    assert "rediss+sentinel://a:1,b:2/main/4" in shown


def test_bad_options_are_refused_with_their_value() -> None:
    for options in ({"ttl_s": 0.0}, {"socket_timeout": -1.0}, {"connect_timeout": float("nan")}):
        with pytest.raises(ConfigError, match=str(next(iter(options)))):
            RedisStore("redis://cache", **options)
    with pytest.raises(ConfigError, match="connections is 0"):
        RedisStore("redis://cache", connections=0)
