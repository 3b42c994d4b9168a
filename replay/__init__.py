"""The replay buffer: first in, first out over steps, on disk (see README.md)."""
