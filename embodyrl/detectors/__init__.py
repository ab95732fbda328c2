"""Failure detectors: what watches a policy act, and says early that an episode will fail."""
