"""Environments: tasks by name, adapters, and a pool of workers (see README.md)."""
