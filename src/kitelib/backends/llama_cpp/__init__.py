"""The lite backend: GGUF models through the C API of llama.cpp."""
