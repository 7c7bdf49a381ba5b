"""Helpers of the test suite: small GGUF files with random weights, damaged copies, and a bare llama.cpp runner."""
