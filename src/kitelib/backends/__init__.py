"""Model runners: each owns sequences and KV memory and does one step at a time."""
