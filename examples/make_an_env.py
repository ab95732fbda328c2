"""Make a simulator, put it into numbered initial states, and step it with chunks of actions.

You learn: where the tasks are listed, what an observation and a step hold, and that an initial
state is a number: the same number always gives the same scene.

Costs: 15 s. Prints: the tasks, the env's spec, one line per chunk. Writes: runs/examples/scene.png.
"""

from pathlib import Path

import torch
from PIL import Image

from embodyrl.build import make_env
from embodyrl.config import env_config
from embodyrl.sims.mujoco.tasks import list_tasks

OUT = Path("runs/examples")


def main() -> None:
    # The tasks of a simulator, and the override that selects each.
    for task in list_tasks():
        print(f"{task.select:22} {task.instruction}")

    # Four envs run in parallel. Everything that a policy must know about them is in the spec.
    config = env_config(
        "mujoco", ["env.task=push", "env.num_envs=4", "env.reward=dense", "env.device=cpu"]
    )
    env = make_env(config)
    print(f"\n{env.spec}\n")

    # Initial state 7 is the same scene in every env, every time.
    obs = env.reset(init=[7, 7, 8, 9])
    print("images ", {name: tuple(image.shape) for name, image in obs.images.items()})
    print("proprio", tuple(obs.proprio.shape), "instruction", obs.instruction)
    print("envs 0 and 1 look alike:", torch.equal(obs.images["front"][0], obs.images["front"][1]))
    OUT.mkdir(parents=True, exist_ok=True)
    scene = Image.fromarray(obs.images["front"][0].numpy())
    scene.resize((256, 256), Image.Resampling.NEAREST).save(OUT / "scene.png")

    # A chunk is H actions (N, H, A) in [-1, 1]. Each env executes it until its episode ends.
    generator = torch.Generator().manual_seed(0)
    ended = torch.zeros(4, dtype=torch.bool)
    while not ended.all():
        actions = torch.rand(4, 10, env.spec.action_dim, generator=generator) * 2 - 1
        step = env.step(actions)
        ended |= step.done
        print(
            f"executed {step.valid.sum(1).tolist()}  reward "
            f"{[round(r, 3) for r in step.reward.sum(1).tolist()]}  success {step.success.tolist()}"
            f"  terminated {step.terminated.tolist()}  truncated {step.truncated.tolist()}"
        )
    env.close()
    print(f"\nThe first scene is in {OUT / 'scene.png'}.")


if __name__ == "__main__":
    main()
