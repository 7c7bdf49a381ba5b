"""Where in a bucket a key lives, and back.

=========================================== ==========================================================
key                                         object, below ``<prefix>/v1``
=========================================== ==========================================================
``kite:{<cf[:4]>}:<model>:<kind>:<cf>``     ``units/<model>/<kind>/<cf[:2]>/<cf>``
any other                                   ``other/k<the key; "=" and two hex digits for odd bytes>``
epoch `n` of `name`                         ``epochs/<name>/<n, 20 digits>``
=========================================== ==========================================================

One model, or one kind of one model, is one prefix: it can be listed, counted or dropped without looking at the others.
The two digits cut a model into 256 parts that can be listed side by side, and spread its requests: S3 limits requests
per prefix.
"""

from __future__ import annotations

import re
import urllib.parse
from typing import Final

__all__ = ["EPOCHS", "OTHER", "UNITS", "epoch_of", "epoch_path", "key_of", "object_path", "share_before"]

UNITS: Final = "units"
OTHER: Final = "other"
EPOCHS: Final = "epochs"

_KEY: Final = re.compile(r"kite:\{([0-9a-f]{4})\}:([0-9a-f]{16}):([a-z]{1,16}):([0-9a-f]{64})")
_PATH: Final = re.compile(r"units/([0-9a-f]{16})/([a-z]{1,16})/([0-9a-f]{2})/([0-9a-f]{64})")
_EPOCH: Final = re.compile(r"[0-9]{20}")
_MAX_OTHER_BYTES: Final = 700
"""S3 allows 1024 bytes for the whole name of an object; what is left is for the prefix."""


def object_path(key: str) -> str | None:
    """The object that holds the key's value, below the store's root; None if the key is too long for S3."""
    match = _KEY.fullmatch(key)
    if match and match[4].startswith(match[1]):
        _, model, kind, cf = match.groups()
        return f"{UNITS}/{model}/{kind}/{cf[:2]}/{cf}"
    quoted = urllib.parse.quote(key, safe="", errors="surrogatepass")
    # Dots would make "." and ".." out of some keys, and clients treat "%" and "~" in different ways.
    name = quoted.replace("~", "%7E").replace(".", "%2E").replace("%", "=")
    return f"{OTHER}/k{name}" if len(name) <= _MAX_OTHER_BYTES else None


def key_of(path: str) -> str | None:
    """The key whose value an object holds, the inverse of `object_path`; None if it is no such object."""
    match = _PATH.fullmatch(path)
    if match:
        model, kind, digits, cf = match.groups()
        return f"kite:{{{cf[:4]}}}:{model}:{kind}:{cf}" if cf.startswith(digits) else None
    if not path.startswith(f"{OTHER}/k"):
        return None
    quoted = path[len(OTHER) + 2 :].replace("=", "%")
    try:
        key = urllib.parse.unquote(quoted, errors="surrogatepass")
    except UnicodeDecodeError:
        return None
    return key if object_path(key) == path else None


def epoch_path(name: str, epoch: int) -> str:
    """The empty object that says: the epoch of `name` is at least `epoch`."""
    return f"{EPOCHS}/{name}/{epoch:020d}"


def epoch_of(path: str) -> int | None:
    """The number in the name of such an object; None if it is another."""
    digits = path.rpartition("/")[2]
    return int(digits) if _EPOCH.fullmatch(digits) else None


def share_before(path: str) -> float:
    """Which share of its model's units of its kind comes before this one in a listing, 0 to 1: fingerprints are
    evenly spread, so the digits say it. 1 for objects that are no units."""
    match = _PATH.fullmatch(path)
    return (int(match[4][:12], 16) + 1) / 16**12 if match else 1.0
