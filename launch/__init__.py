"""Setting up and launching runs (see README.md)."""
