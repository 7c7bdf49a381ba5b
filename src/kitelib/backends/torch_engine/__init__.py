"""The torch engine: decoder-only Hugging Face models over a paged KV cache, on CUDA and on the CPU."""
