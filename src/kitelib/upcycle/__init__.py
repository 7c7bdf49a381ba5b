"""Upcycle: what a finished computation leaves behind is cut into recyclable units (RU) and kept."""
