"""What third parties test their own parts with; needs no test framework.

`check_store` proves a store, `check_backend` proves a backend, `FaultyStore` breaks a store on schedule::

    def test_my_store(tmp_path):
        anyio.run(check_store, lambda: MyStore(tmp_path))

    def test_my_backend():
        check_backend(lambda: MyBackend("model"))
"""

from __future__ import annotations

from kitelib.testing.backends import check_backend
from kitelib.testing.stores import Fault, FaultyStore, Operation, check_store, fault_every

__all__ = ["Fault", "FaultyStore", "Operation", "check_backend", "check_store", "fault_every"]
