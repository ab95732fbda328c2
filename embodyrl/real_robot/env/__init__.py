"""A robot as a ``VecEnv``, and the simulated arm."""
