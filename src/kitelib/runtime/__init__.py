"""The only door between the event loop and threads: calls out, streams back, limits."""
