"""Trajectory diffusion: pieces of recorded episodes, and new ones as a policy would play them."""
