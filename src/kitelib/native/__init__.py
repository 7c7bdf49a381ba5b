"""The part of kitelib that is written in C. Everything works without it, only slower.

`library.native_library` gives it, or None where it was not built; ``python -m kitelib.native.build`` builds it.
"""
