"""Upcycle: what a finished computation leaves behind is cut into recyclable units (RU) and kept."""

from kitelib.upcycle.preheat import CanPreheat, preheat_ru_pool

__all__ = ["CanPreheat", "preheat_ru_pool"]
