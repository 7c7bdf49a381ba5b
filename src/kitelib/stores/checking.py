"""Every check that a stored unit passes before anything is done with it."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence

from kitelib.config import PoolConfig
from kitelib.errors import FormatError
from kitelib.stores.forms import StoredForms
from kitelib.stores.keys import KeyRing
from kitelib.stores.pinned import Pinned
from kitelib.stores.wanted import Wanted
from kitelib.upcycle.unit import HEAD_BYTES, RecyclableUnit, peek, unpack

__all__ = ["Checked", "UnitChecks"]

_LOG = logging.getLogger("kitelib.pool")


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    """Values after their checks: the leading good units, and keys of what failed a check, and of what is older than the
    last `clear`, or than the configuration allows."""

    units: list[RecyclableUnit]
    refused: list[str]
    old: list[str]


class UnitChecks:
    """Reads stored units and checks them, in any thread.

    Attributes:
        decode_s_per_byte: seconds that reading a byte of an outer tier's value takes; measured as units are read.
    """

    def __init__(self, config: PoolConfig, keys: KeyRing, forms: StoredForms) -> None:
        self.decode_s_per_byte = 1e-9
        self._ttl_s = config.ttl_seconds
        self._keys = keys
        self._forms = forms

    def check(self, pairs: Sequence[tuple[Wanted, bytes | Pinned]], epoch: int, *, authenticate: bool) -> Checked:
        """The leading good units, and what is to be deleted.

        Args:
            pairs: what is looked for, and what is stored there.
            epoch: the pool's; units of an earlier one are old. Pinned units are let go of when it changes, so theirs is
                not looked at, and they don't expire.
            authenticate: the values come from outside this process.
        """
        units: list[RecyclableUnit] = []
        refused: list[str] = []
        old: list[str] = []
        begun, num_bytes = time.perf_counter(), 0
        # Tiers only know how long they have had a unit.
        oldest = -math.inf if self._ttl_s is None else time.time() - self._ttl_s
        for wanted, value in pairs:
            key = self._keys.of(wanted.root) if authenticate else None
            try:
                if isinstance(value, Pinned):
                    unit = value.read(wanted.expected)
                else:
                    unit = unpack(value, expected=wanted.expected, hmac_key=key)
            except Exception as error:  # noqa: BLE001 - bytes from a store may break anything that reads them
                _LOG.warning("dropped a unit: %s", str(error))  # the error would keep what was read until now alive
                refused.append(wanted.key)
                break
            if isinstance(value, bytes) and _is_old(unit, epoch, oldest):  # and most of what follows probably as well
                rest = [(each.key, blob) for each, blob in pairs[len(units) :] if isinstance(blob, bytes)]
                old = [each for each, blob in rest if _is_old(blob, epoch, oldest)]
                break
            if not self._forms.accepts(unit):
                _LOG.warning("dropped a unit: its codec %r is lossy, and lossy units were not asked for", unit.codec)
                refused.append(wanted.key)
                break
            units.append(unit)
            num_bytes += len(value) if isinstance(value, bytes) else 0
        if authenticate and num_bytes > 2**16:
            rate = (time.perf_counter() - begun) / num_bytes
            self.decode_s_per_byte += (rate - self.decode_s_per_byte) / 8
        return Checked(units, refused, old)


def _is_old(unit: RecyclableUnit | bytes, epoch: int, oldest: float) -> bool:
    """Whether it was computed before the pool was cleared, or too long ago."""
    try:
        head = peek(unit[:HEAD_BYTES]) if isinstance(unit, bytes) else unit
    except FormatError:
        return False
    return head.epoch < epoch or head.created_at < oldest
