"""Algorithms: one file each, read from top to bottom.

An algorithm is built as ``cls(config, policy)`` and has

- ``source``: ``"rollout"`` (its batch is a ``RolloutBatch``) or ``"demos"`` (``Demonstrations``),
- ``update(batch, progress=, generator=) -> dict[str, float]``: one iteration, owning optimiser and epochs,
- ``policy``: what acts in rollouts, and ``result``: what is evaluated, saved and deployed,
- ``state_dict()`` and ``load_state_dict()``: what an exact resume needs beyond the policy.
"""
