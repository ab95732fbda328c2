"""The settings of ``ManiSkillEnv``, and what they may be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from embodyrl.env import EnvConfig
from embodyrl.errors import UserError, did_you_mean
from embodyrl.machine import usable_cores
from embodyrl.ranges import CountOrZero, Names, Pixels, Range, names_in
from embodyrl.sims.maniskill.base_env import REWARDS
from embodyrl.sims.maniskill.tasks import SPLITS
from embodyrl.storage.paths import machine_setting

BACKENDS = ("auto", "cpu", "gpu")


@dataclass(frozen=True)
class ManiSkillConfig(EnvConfig):
    """Settings of ``ManiSkillEnv``.

    Attributes:
        task: registered id, e.g. ``"PickCube-v1"``, or several; ``tasks.list_tasks()`` names them
            all. Several must agree in what an action is. On a GPU each task takes the memory of
            ``num_envs`` scenes.
        obs: ``"state"`` (proprio is the flat task state, no cameras) or ``"rgb"`` (camera images,
            and proprio what ManiSkill gives to a policy with cameras). Privileged is the flat task
            state in both.
        cameras: the task's cameras to draw; empty for all, or those that several tasks share.
        image_size: side of the square images in pixels.
        control_mode: what an action means, one of the robot's; empty for its default.
        reward: ``"sparse"`` (1 at success, -1 at failure), ``"dense"`` or ``"normalized_dense"``.
        max_episode_steps: control steps until truncation; 0 for each task's own number.
        robot: robot id; empty for the task's own.
        backend: ``"gpu"`` steps and draws all scenes at once on the GPU that ``device`` names;
            ``"cpu"`` steps and draws them one by one on the CPU, wherever the tensors go;
            ``"auto"`` is the one that fits ``device``.
        num_workers: processes that share the envs on the CPU; 1 runs them in this one, 0 takes one
            per core.
    """

    name: str = "maniskill"
    task: Names = "PickCube-v1"
    obs: str = "state"
    cameras: tuple[str, ...] = ()
    image_size: Pixels = 64
    control_mode: str = "pd_ee_delta_pos"
    reward: str = "sparse"
    max_episode_steps: CountOrZero = 0
    robot: str = ""
    backend: str = "auto"
    num_workers: Annotated[int, Range(0, 1024)] = machine_setting(0)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that ``task`` names."""
        return names_in(self.task)

    @property
    def pool_size(self) -> int:
        """How many processes share the envs; 1 means that they run in this one."""
        if self.on_gpu:
            return 1
        if self.num_workers == 0:
            # A process for fewer than four envs takes longer to start than it saves.
            return max(1, min(usable_cores(), self.num_envs // 4))
        return min(self.num_envs, self.num_workers)

    @property
    def on_gpu(self) -> bool:
        """Whether ManiSkill runs on the GPU."""
        return self.backend != "cpu" and self.place().type == "cuda"

    def beside_a_run(self, count: int) -> EnvConfig | None:
        """See ``EnvConfig``; on the CPU, because a process can simulate on a GPU once."""
        own = replace(self, num_envs=count, num_workers=1, device="cpu")
        return replace(own, backend="cpu" if self.backend == "gpu" else self.backend)

    @property
    def uses_gpu(self) -> bool:
        """See ``EnvConfig``."""
        return self.backend != "cpu"


def check_config(config: ManiSkillConfig) -> None:
    """Raises a ``UserError`` for a setting that does not exist; the message names the nearest ones.

    The task, its cameras and its control modes are checked where they are used.
    """
    for key, valid in (
        ("obs", ("state", "rgb")),
        ("reward", REWARDS),
        ("backend", BACKENDS),
        ("split", SPLITS),
    ):
        value = getattr(config, key)
        if value not in valid:
            raise UserError(f"maniskill knows no {key}={value!r}. {did_you_mean(value, valid)}")
