"""YOCO = You Only Compute Once: what is already known is looked up, and only the rest is computed."""
