"""The demo: its parts, and the whole of it as a user starts it."""
