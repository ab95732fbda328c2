"""The tasks that ``embodyrl list`` shows for a robot: those of the simulated arm."""

from __future__ import annotations

from embodyrl.sims.mujoco.tasks import SPLITS, list_tasks

__all__ = ["SPLITS", "list_tasks"]
