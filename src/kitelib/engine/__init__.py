"""The engine: requests in, batched model steps, tokens out, with reuse in between."""
