"""Demonstrations, imitation, then RL, over several seeds: the table and the figure of a task.

    python benchmarks/post_train.py quickstart --seeds 0 1 2
    python benchmarks/post_train.py maniskill_pickcube --seeds 0 1 2

Runs go to ``runs/bench/NAME/SEED`` and can be interrupted and resumed; the result is
``benchmarks/NAME.json`` and ``docs/images/NAME.png``. Success is of the noise-free policy on initial states never
trained on.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from figures import draw_json
from shared import HERE, evaluations, scored, write

from embodyrl.functional.intervals import bootstrap_iqm, wilson
from embodyrl.training.run_folder import finished


@dataclass(frozen=True)
class Job:
    """How a task is demonstrated; its presets are NAME_sft and NAME_ppo, or those given.

    ``settings`` are overrides of both presets.
    """

    title: str
    collect: tuple[str, ...]
    sft: str = ""
    rl: str = ""
    rl_reads_demos: bool = False
    settings: tuple[str, ...] = ()


HIDDEN = ("policy.critic=privileged",)
"""Critics read the simulator's state, which no preset does: an upper bound."""


PICKCUBE = (
    "maniskill",
    "env.task=PickCube-v1",
    "env.obs=state",
    "env.num_envs=16",
    "--episodes",
    "32",
    "--noise",
    "0.2",
)
STACKCUBE = (
    "maniskill",
    "env.task=StackCube-v1",
    "env.obs=state",
    "env.num_envs=16",
    "--episodes",
    "64",
    "--noise",
    "0.1",
)
PICKCUBE_RGB = (
    "maniskill",
    "env.task=PickCube-v1",
    "env.obs=rgb",
    "env.image_size=128",
    "env.num_envs=16",
    "--episodes",
    "64",
    "--noise",
    "0.2",
)
PICK = ("mujoco", "env.task=pick", "env.max_blocks=2", "--episodes", "100", "--noise", "0.15")
LIBERO_OBJECT = (
    "libero",
    "env.suite=libero_object",
    "env.task_ids=[0,1,2]",
    "env.image_size=64",
    "env.num_envs=15",
    "--episodes",
    "15",
    "--noise",
    "0.1",
)
LIBERO_SPATIAL = (
    "libero",
    "env.suite=libero_spatial",
    "env.image_size=64",
    "env.num_envs=40",
    "--episodes",
    "100",
    "--noise",
    "0.1",
)
PUSH = ("mujoco", "env.task=push", "--episodes", "100", "--noise", "0.15")
JOBS = {
    "mujoco_push_pa_rl": Job(
        "Push a block onto the square, pixels, no privileged critic; PA-RL",
        PUSH,
        sft="mujoco_push_sft",
        rl="mujoco_push_pa_rl",
        rl_reads_demos=True,
    ),
    "libero_object_pa_rl": Job(
        "LIBERO-Object, three tasks, two 64x64 cameras, no privileged critic; PA-RL",
        LIBERO_OBJECT,
        sft="libero_object_sft",
        rl="libero_object_pa_rl",
        rl_reads_demos=True,
    ),
    "mujoco_pick_pa_rl": Job(
        "The quickstart's task, pixels, no privileged critic; PA-RL",
        PICK,
        sft="mujoco_pick_sft",
        rl="mujoco_pick_pa_rl",
        rl_reads_demos=True,
    ),
    "libero_spatial_pa_rl": Job(
        "LIBERO-Spatial, ten tasks, two 64x64 cameras, no privileged critic; PA-RL",
        LIBERO_SPATIAL,
        sft="libero_spatial_sft",
        rl="libero_spatial_pa_rl",
        rl_reads_demos=True,
    ),
    "quickstart_sac_flow": Job(
        "The quickstart's task with critics that read the simulator's state; SAC-Flow",
        PICK,
        sft="mujoco_pick_sft",
        rl="mujoco_pick_sac_flow",
        rl_reads_demos=True,
        settings=HIDDEN,
    ),
    "quickstart_ppo": Job(
        "The quickstart's task with a critic that reads the simulator's state; PPO",
        PICK,
        sft="mujoco_pick_sft",
        rl="mujoco_pick_ppo",
        settings=HIDDEN,
    ),
    "maniskill_pickcube": Job(
        "ManiSkill PickCube-v1, state, privileged critic; PPO", PICKCUBE, settings=HIDDEN
    ),
    "maniskill_pickcube_pa_rl": Job(
        "ManiSkill PickCube-v1, state, no privileged critic; PA-RL",
        PICKCUBE,
        sft="maniskill_pickcube_sft",
        rl="maniskill_pickcube_pa_rl",
    ),
    "maniskill_pickcube_rgb_pa_rl": Job(
        "ManiSkill PickCube-v1, a 128x128 camera, no privileged critic; PA-RL",
        PICKCUBE_RGB,
        sft="maniskill_pickcube_rgb_sft",
        rl="maniskill_pickcube_rgb_pa_rl",
        rl_reads_demos=True,
    ),
    "maniskill_pushcube": Job(
        "ManiSkill PushCube-v1, state, privileged critic; PPO",
        (
            "maniskill",
            "env.task=PushCube-v1",
            "env.obs=state",
            "env.num_envs=16",
            "--episodes",
            "16",
            "--noise",
            "0.3",
        ),
        settings=HIDDEN,
    ),
    "maniskill_stackcube": Job(
        "ManiSkill StackCube-v1, state, privileged critic; PPO", STACKCUBE, settings=HIDDEN
    ),
    "maniskill_stackcube_pa_rl": Job(
        "ManiSkill StackCube-v1, state, no privileged critic; PA-RL",
        STACKCUBE,
        sft="maniskill_stackcube_sft",
        rl="maniskill_stackcube_pa_rl",
    ),
    "libero_object": Job(
        "LIBERO-Object, three tasks, two 64x64 cameras, privileged critic; PPO",
        LIBERO_OBJECT,
        settings=HIDDEN,
    ),
}


def embodyrl(folder: Path, *arguments: str) -> None:
    """Runs a command; its minutes are added to those in ``folder``, where an interrupted benchmark finds them again."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "embodyrl.cli", *arguments], check=True)
    (folder / "minutes.json").write_text(
        json.dumps(spent(folder) + (time.monotonic() - began) / 60)
    )


def spent(folder: Path) -> float:
    """Minutes that the commands of a seed took so far."""
    path = folder / "minutes.json"
    return json.loads(path.read_text()) if path.exists() else 0.0


def run(name: str, seed: int, extra: list[str]) -> Path:
    """One seed, or what is left of it; returns its folder."""
    folder = Path("runs/bench") / name / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    if finished(folder / "rl"):
        return folder
    if name == "quickstart":
        embodyrl(folder, "quickstart", "--seed", str(seed), "--out", str(folder))
        return folder
    common = imitate(name, seed)
    rl = ["run.name=rl", f"run.init_checkpoint={folder / 'sft'}", *extra]
    if JOBS[name].rl_reads_demos:
        rl.append(f"data.path={folder / 'demos'}")
    embodyrl(folder, "train", JOBS[name].rl or f"{name}_ppo", *common, *rl)
    return folder


def imitate(name: str, seed: int) -> list[str]:
    """The demonstrations and the imitation policy of one seed; returns what all its runs are given."""
    folder = Path("runs/bench") / name / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    common = [f"run.out={folder}", f"run.seed={seed}", f"env.seed={seed}", *JOBS[name].settings]
    if not (folder / "demos").exists():
        collect = ("collect", *JOBS[name].collect, "--seed", str(seed))
        embodyrl(folder, *collect, "--out", str(folder / "demos"))
    if not finished(folder / "sft"):
        sft = JOBS[name].sft or f"{name}_sft"
        embodyrl(folder, "train", sft, *common, "run.name=sft", f"data.path={folder / 'demos'}")
    return common


def chooses(folder: Path) -> bool:
    """Whether the policy chooses among proposals."""
    config = yaml.safe_load((folder / "rl" / "config.yaml").read_text())
    return bool(config["policy"].get("chooser_width"))


def distil(folder: Path, seed: int) -> dict:
    """The policy alone after it imitated what it solved by choosing, on the quickstart's task."""
    own = folder / "own"
    if not own.exists():
        policy = ("--policy", str(folder / "rl"), "--episodes", "600", "--seed", str(seed + 100))
        embodyrl(folder, "collect", "mujoco_pick_sft", *policy, "--out", str(own))
    embodyrl(
        folder,
        "train",
        "mujoco_pick_sft",
        *(f"run.out={folder}", f"run.seed={seed}", "run.name=distilled", f"data.path={own}"),
        *(f"run.init_checkpoint={folder / 'rl'}", "algorithm.lr=3e-4", "algorithm.batch_size=128"),
        "algorithm.hindsight_coef=0.3",  # as in the quickstart
    )
    last = evaluations(folder / "distilled")[-1]
    solved, episodes = last["successes"], last["episodes"]
    return {"distilled": [solved, episodes, *wilson(solved, episodes)]}


def alone(folder: Path) -> dict:
    """Successes of the policy without its chooser."""
    return {"alone": scored(folder / "rl", folder / "alone.json", "policy.proposals=1")}


def read(folder: Path, seed: int) -> dict:
    """Evaluations of one seed, in the order of training."""
    evals = evaluations(folder / "rl")
    first, last = evals[0], evals[-1]
    return {
        "seed": seed,
        "before": [
            first["successes"],
            first["episodes"],
            *wilson(first["successes"], first["episodes"]),
        ],
        "after": [
            last["successes"],
            last["episodes"],
            *wilson(last["successes"], last["episodes"]),
        ],
        "env_steps": last["env_steps"],
        "minutes_rl": last["minutes"],
        "minutes_all": spent(folder),
        "commit": json.loads((folder / "rl" / "meta.json").read_text())["commit"],
        **(alone(folder) if chooses(folder) else {}),
        **(distil(folder, seed) if folder.parent.name == "quickstart" else {}),
        "evals": evals,
    }


def main() -> None:
    """Runs all seeds, then writes JSON and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=["quickstart", *JOBS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="for the RL run, e.g. run.iterations=100")
    arguments = parser.parse_args()
    quick = arguments.name == "quickstart"
    title = "Quickstart: pick up the named block, pixels" if quick else JOBS[arguments.name].title
    seeds = []
    for seed in sorted(arguments.seeds):
        seeds.append(read(run(arguments.name, seed, arguments.overrides), seed))
        scores = {when: [s[when][0] / s[when][1] for s in seeds] for when in ("before", "after")}
        result = {
            "title": title,
            "iqm": {w: bootstrap_iqm(x) for w, x in scores.items()},
            "seeds": seeds,
            "peak_memory_gib_of_one_process": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
            / 2**20,
        }
        write(arguments.name, result)
        draw_json(HERE / f"{arguments.name}.json", "training")
        print(json.dumps({k: result[k] for k in ("title", "iqm")}), flush=True)


if __name__ == "__main__":
    main()
