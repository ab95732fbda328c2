"""Simulators behind the one env API; each is imported only when asked for."""
