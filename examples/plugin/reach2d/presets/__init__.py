"""Presets of the package."""
