"""Units by their fingerprint alone, for people and tools."""

from __future__ import annotations

from typing import Final

from kitelib.errors import FormatError, InvalidRequestError
from kitelib.fingerprint import FINGERPRINT_BYTES, store_key
from kitelib.stores.memory import MemoryStore
from kitelib.stores.tiered import Tiers
from kitelib.upcycle.unit import RecyclableUnit, inspect

__all__ = ["units_by_cf"]

_OUTER_KINDS: Final = ("kv", "logits", "completion", "lora")


async def units_by_cf(
    cf: bytes | str, memory: MemoryStore, tiers: Tiers, model: str | None, epoch: int
) -> tuple[list[RecyclableUnit], int]:
    """The units whose fingerprint is `cf`, of any model in memory and of one model in the outer tiers, and how many
    stored values were no units.

    Args:
        model: `model_key` of that model; None looks into memory only.
        epoch: older units are left out.

    Raises:
        InvalidRequestError: `cf` is neither 32 bytes nor 64 hexadecimal digits.
    """
    digits = cf.lower() if isinstance(cf, str) else cf.hex()
    if len(digits) != 2 * FINGERPRINT_BYTES or not set(digits) <= set("0123456789abcdef"):
        raise InvalidRequestError(f"the fingerprint {digits!r} has {len(digits)} digits; give 64, or 32 bytes")
    values: dict[str, bytes | None] = {}
    for key in memory.keys():  # noqa: SIM118 - a method of the store, not a mapping
        if key.endswith(digits):
            (values[key],) = await memory.get_many([key])
    if model is not None and tiers.tiers:
        keys = [store_key(model, kind, bytes.fromhex(digits)) for kind in _OUTER_KINDS]
        keys = [key for key in keys if values.get(key) is None]
        for key, found in zip(keys, await tiers.get_many(keys), strict=True):
            values[key] = None if found is None else found[1]
    units, refused = [], 0
    for value in values.values():
        if value is None:
            continue
        try:
            unit = inspect(value)
        except FormatError:
            refused += 1
            continue
        if unit.epoch >= epoch:
            units.append(unit)
    return units, refused
