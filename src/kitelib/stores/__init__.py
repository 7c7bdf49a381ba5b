"""Tiers of the pool: each maps the key of a recyclable unit to its bytes."""
