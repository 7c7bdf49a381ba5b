"""Attention over a paged KV cache: one module per way to compute it."""
