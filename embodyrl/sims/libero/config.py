"""The settings of a LIBERO env."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from embodyrl.env import EnvConfig
from embodyrl.ranges import Count, CountOrZero, Names, Pixels, Processes, Range, Threads
from embodyrl.storage.paths import machine_setting

PERTURBED = {
    "swap": "objects have exchanged their places",
    "object": "objects look different",
    "lan": "the instruction in other words",
    "task": "another task in the same scene",
}
"""Ending of a LIBERO-PRO suite -> what differs (arXiv:2510.03827)."""


@dataclass(frozen=True)
class LiberoConfig(EnvConfig):
    """Settings of a LIBERO env.

    Attributes:
        suite: ``libero_spatial``, ``libero_object``, ``libero_goal``, ``libero_10``, ``libero_90``,
            ``libero_100`` (90 and 10), ``libero_130`` (all five) or one of LIBERO-PRO's; or several
            of them. ``split="ood_swap"`` is short for the suite of that ending (``_swap``,
            ``_lan``, ``_task``, ``_object``, ``_with_mug`` ...) with its official initial states.
        task_ids: numbers of the suite's tasks; empty means all. With several suites they count on
            through them: of two suites with ten tasks, 10 is the first of the second.
        cameras: any of ``agentview`` and ``wrist``.
        image_size: height and width of the pictures.
        backend: ``native`` steps MuJoCo with a compiled controller and draws with mujoco-warp.
            ``warp`` does everything with mujoco-warp, thousands of worlds at once on a GPU.
            ``robosuite`` is the reference: robosuite's own controller, and OpenGL.
        num_workers: processes that share the envs; 1 runs them in this one. Each keeps its scenes
            on ``device``.
        num_threads: of each process of the native backend; 0 means as many as torch uses there.
        max_episode_steps: control steps of 1/20 s until truncation; 0 means what published results
            use for each task's suite.
        settle_steps: control steps with the gripper open at the start of every episode, while
            objects fall into place.
        max_models: scenes with their visual geometry that each process keeps. One takes about .4 GB
            and 3 s to make. Tasks with the same objects (all of LIBERO-Spatial, all of LIBERO-Goal)
            share one.
    """

    name: str = "libero"
    backend: str = "native"
    suite: Names = "libero_spatial"
    task_ids: tuple[Annotated[int, Range(0, 1000)], ...] = ()
    cameras: tuple[str, ...] = ("agentview", "wrist")
    image_size: Pixels = 128
    num_workers: Processes = machine_setting(1)
    num_threads: Threads = machine_setting(0)
    max_episode_steps: CountOrZero = 0
    settle_steps: CountOrZero = 10
    max_models: Count = machine_setting(10)

    @property
    def uses_gpu(self) -> bool:
        """See ``EnvConfig``; physics with ``backend="warp"`` and the cameras of all backends do."""
        return self.backend == "warp" or bool(self.cameras)

    @property
    def suites(self) -> dict[str, str]:
        """The suites of the split: those of ``suite``, or LIBERO-PRO's version of each.

        They are the keys; each value is how ``suite`` names it.
        """
        from embodyrl.sims.libero.selection import suites_in

        ood = self.split.startswith("ood_")
        return suites_in(self.suite, self.split.removeprefix("ood") if ood else "")

    def ood_splits(self) -> dict[str, str]:
        """See ``EnvConfig``; LIBERO-PRO's four perturbations, where the package has the suites."""
        from embodyrl.sims.libero.suites import suite_names

        known = set(suite_names())
        return {
            f"ood_{ending}": about
            for ending, about in PERTURBED.items()
            if all(name in known for name in replace(self, split=f"ood_{ending}").suites)
        }

    def without_pictures(self) -> EnvConfig:
        """See ``EnvConfig``."""
        return replace(self, cameras=())
