"""Algorithms: one file each, read from top to bottom.

An algorithm is built as ``cls(config, policy)`` and has

- ``source``: ``"rollout"`` (its batch is a ``RolloutBatch``), ``"groups"`` (it has a
  ``collect(env, draw, ...)`` of its own), ``"demos"`` (``Demonstrations``), or ``"transitions"``
  (``Transitions``, off-policy: it then has ``act(obs, generator)`` as well, see
  ``rollouts.collect.Act``),
- ``wants_demos`` and ``add_demos(demos)`` where it learns from demonstrations beside its rollouts,
- ``update(batch, progress=, generator=) -> dict[str, float]``: one iteration, owning optimiser and
  epochs,
- ``policy``: what acts in rollouts, and ``result``: what is evaluated, saved and deployed,
- ``state_dict()`` and ``load_state_dict()``: what an exact resume needs beyond the policy.
"""
