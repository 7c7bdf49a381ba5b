"""What third parties test their own parts with; needs no test framework.

`check_store` proves a store, `check_shared_store` one that several processes use, `check_backend` a backend;
`FaultyStore` breaks a store on schedule::

    def test_my_store(tmp_path):
        anyio.run(check_store, lambda: MyStore(tempfile.mkdtemp(dir=tmp_path)))

    def test_my_shared_store(tmp_path):
        anyio.run(check_shared_store, lambda place: MyStore(tmp_path / place))

    def test_my_backend():
        check_backend(lambda: MyBackend("model"))
"""

from __future__ import annotations

from kitelib.testing.backends import check_backend
from kitelib.testing.faulty import Fault, FaultyStore, Operation, fault_every
from kitelib.testing.shared_stores import check_shared_store
from kitelib.testing.stores import check_store

__all__ = [
    "Fault",
    "FaultyStore",
    "Operation",
    "check_backend",
    "check_shared_store",
    "check_store",
    "fault_every",
]
