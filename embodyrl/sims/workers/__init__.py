"""Simulators in worker processes, for those that run one episode per core."""
