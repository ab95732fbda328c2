"""embodyrl: reinforcement learning for vision-language-action policies.

Importing this package imports no simulator, no JAX and no transformers; each part is imported by
its own name, for example ``embodyrl.env``, ``embodyrl.functional.flow`` or
``embodyrl.sims.mujoco``.
"""

__version__ = "0.1.0"
