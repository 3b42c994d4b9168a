"""Typed settings, YAML presets and strict loading (see README.md)."""
