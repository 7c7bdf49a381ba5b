"""The command `kite`: run one prompt, chat, or watch the demo. Nothing here is needed to use the library."""
