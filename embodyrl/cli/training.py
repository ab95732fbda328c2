"""``embodyrl train`` and ``embodyrl eval``."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

from embodyrl import starting
from embodyrl.cli.verbs import CHECKPOINT, JSON, OVERRIDES, Verb, print_as
from embodyrl.errors import UserError
from embodyrl.interrupt import INTERRUPTED
from embodyrl.real_robot.cli import (
    add_dream_options,
    add_guidance_options,
    dream_options,
    guidance_options,
    robot_commands,
)

TRAIN_HELP = """examples:
  embodyrl train mujoco_pick_sft data.path=data/pick
      learns from demonstrations, and writes the run runs/mujoco_pick_sft
  embodyrl train mujoco_pick_ppo run.init_checkpoint=runs/mujoco_pick_sft
      improves this policy by reinforcement learning
  embodyrl train mujoco_pick_ppo run.seed=1 algorithm.lr=3e-5
      any key of the config can be overridden
  embodyrl train mujoco_pick_ppo run.workers=2 --launcher ray
      collects rollouts in two processes, on this machine or on a cluster
  torchrun --nproc-per-node 8 -m embodyrl.cli train libero_object_vla_ppo ...
      collects rollouts and computes gradients on 8 GPUs
`embodyrl list presets` names the presets. `embodyrl train PRESET --dry-run` prints all keys.
If a run was interrupted, the same command continues it.
"""
EVAL_HELP = """examples:
  embodyrl eval runs/mujoco_pick_ppo
      the newest checkpoint, on held-out initial states
  embodyrl eval runs/mujoco_pick_ppo env.split=ood_camera
      with a camera position that was never trained on
  embodyrl eval runs/mujoco_pick_ppo --episodes 500 --json
  embodyrl eval runs/mujoco_pick_ppo --ood
      a table of all splits out of the training distribution
  embodyrl eval runs/mujoco_pick_ppo --ablate
      which inputs it uses: each camera blank, another instruction, ...
  embodyrl eval runs/mujoco_pick_ppo --attempts 8
      how many states are solved at least once in 1 to 8 attempts
  embodyrl eval runs/mujoco_pick_ppo --video films run.videos=4
      films the first four episodes: films/0000_pick_success.mp4 ...
  embodyrl eval runs/mujoco_pick_sft --dream runs/world/model
  embodyrl eval runs/mujoco_pick_ppo --base runs/mujoco_pick_sft --guidance 1.5
      moves 1.5 times as far from the base policy as the training did
The score is the success rate; if the environment reports no success, it is the mean return. --json
has both.
"""


def add_train_verb(verb: Verb) -> None:
    """Adds ``train`` to the parser."""
    text = "Trains a policy, by supervised fine-tuning or reinforcement learning."
    sub = verb("train", _train, text, TRAIN_HELP, torch="workers")
    sub.add_argument("preset", help="a preset's name, or a YAML file")
    sub.add_argument("overrides", nargs="*", metavar="key.sub=value", help=OVERRIDES)
    text = (
        "print the complete config, build one env, the policy without weights and the tables of "
        "the data, and refuse what the run would refuse; nothing is written"
    )
    sub.add_argument("--dry-run", action="store_true", help=text)
    text = "with --dry-run: estimate how much of the device's memory the run will need"
    sub.add_argument("--memory", action="store_true", help=text)
    text = (
        "where rollouts are collected. ray: by run.workers processes, each with its part of the "
        "envs; robot: by `embodyrl act` on the robot's computer"
    )
    sub.add_argument("--launcher", choices=["ray", "robot"], help=text)
    text = "robot: the address where this command waits for `embodyrl act` (default: %(default)s)"
    sub.add_argument("--listen", default="127.0.0.1:8001", metavar="HOST:PORT", help=text)
    text = "robot: a file with the token that `embodyrl act` must send"
    sub.add_argument("--token-file", default="", metavar="FILE", help=text)
    text = "ray: address of a running cluster, or auto (default: start one for this run)"
    sub.add_argument("--ray-address", default="", metavar="ADDRESS", help=text)
    text = "ray: CPU cores per process (default: %(default)s)"
    sub.add_argument("--worker-cpus", type=float, default=1.0, metavar="N", help=text)
    text = "ray: GPUs per process (default: %(default)s)"
    sub.add_argument("--worker-gpus", type=float, default=0.0, metavar="N", help=text)


def _train(a: argparse.Namespace) -> int:
    from embodyrl.config import compose, to_yaml

    _refuse_unread_options(a)
    config = compose(a.preset, a.overrides)
    if a.dry_run:
        from embodyrl.training.dry_run import try_run
        from embodyrl.training.memory_estimate import estimate, table

        # Remarks are comments, so that all of it is a preset.
        print(to_yaml(config), end="", flush=True)
        lines, spec = try_run(config)
        if a.memory and spec is not None:
            lines += table(estimate(config, spec)).splitlines()
        print("\n".join(f"# {line}" for line in lines))
        return 0
    from embodyrl.training.dry_run import about_profile
    from embodyrl.training.run_folder import finished
    from embodyrl.training.runner import train

    options: dict[str, Any] = {}
    if (text := about_profile(config)) and os.environ.get("RANK", "0") == "0":
        print(f"embodyrl: the env is {text}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        # Where rollouts are collected and gradients computed: by torchrun's processes, by those of
        # Ray, on a robot's computer, or (without an option) in this process.
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
            from embodyrl.distributed.fsdp import join_ranks

            if a.launcher:
                raise UserError(
                    "torchrun starts the processes already. Leave it or --launcher out."
                )
            options["ranks"] = stack.enter_context(join_ranks(config))
            config = options["ranks"].config
        elif a.launcher == "ray":
            from embodyrl.distributed.ray_pool import ray_rollouts

            where = {"address": a.ray_address, "cpus": a.worker_cpus, "gpus": a.worker_gpus}
            options["rollouts"] = partial(ray_rollouts, config, **where)
        elif a.launcher == "robot":
            options["rollouts"] = robot_commands().remote_actor(config, a.listen, a.token_file)
        folder = train(config, command=a.command_line, **options)
        # Of torchrun's processes only the first reports.
        if "ranks" in options and not options["ranks"].first:
            return 0
        if not finished(folder):
            return INTERRUPTED
        print(f"Done: {folder}. Look at it with: embodyrl report {shlex.quote(str(folder))}")
    return 0


def _refuse_unread_options(a: argparse.Namespace) -> None:
    """Refuses options of ``train`` that another one makes useless."""
    if a.memory and not a.dry_run:
        raise UserError("--memory estimates what a run will need: give --dry-run too.")
    for launcher, names in (
        ("ray", ("ray_address", "worker_cpus", "worker_gpus")),
        ("robot", ("listen", "token_file")),
    ):
        changed = [n for n in names if getattr(a, n) != a.parser.get_default(n)]
        if changed and a.launcher != launcher:
            option = "--" + changed[0].replace("_", "-")
            raise UserError(f"{option} is read with --launcher {launcher} alone. Leave it out.")


def add_eval_verb(verb: Verb) -> None:
    """Adds ``eval`` to the parser."""
    text = "Scores a checkpoint on held-out initial states."
    sub = verb("eval", _eval, text, EVAL_HELP, torch="workers")
    sub.add_argument("checkpoint", help=CHECKPOINT)
    sub.add_argument("overrides", nargs="*", metavar="key.sub=value", help=OVERRIDES)
    text = "number of episodes (default: as in training)"
    sub.add_argument("--episodes", type=int, default=0, metavar="N", help=text)
    text = "of the policy's noise (default: %(default)s)"
    sub.add_argument("--seed", type=int, default=0, help=text)
    add_guidance_options(sub)
    text = "an exported file (.onnx or .npz) that acts in place of the checkpoint's own policy"
    sub.add_argument("--policy", default="", metavar="FILE", help=text)
    add_dream_options(sub)
    text = "try each initial state so often, with other noise every time (default: %(default)s)"
    sub.add_argument("--attempts", type=int, default=1, metavar="K", help=text)
    text = "score every split out of the training distribution, too"
    sub.add_argument("--ood", action="store_true", help=text)
    text = (
        "which inputs the policy uses: also score it with each camera blank, with pictures and "
        "instruction of another episode, without instruction, and with proprioception that stands "
        "still"
    )
    sub.add_argument("--ablate", action="store_true", help=text)
    text = "also film the first run.videos episodes, as files of this folder"
    sub.add_argument("--video", default="", metavar="FOLDER", help=text)
    sub.add_argument("--json", action="store_true", help=JSON)


def _beside_a_file(a: argparse.Namespace) -> str:
    """What was given for a policy that is no exported file; mostly nothing."""
    given = {"--base": a.base, "--dream": a.dream, "--ood": a.ood, "--ablate": a.ablate}
    named = [name for name, value in given.items() if value]
    return next(iter([*named, *(o for o in a.overrides if o.startswith("policy."))]), "")


def _eval(a: argparse.Namespace) -> int:
    from embodyrl.training.ablate import ablate_inputs, print_ablation
    from embodyrl.training.evaluate import evaluate_checkpoint, print_evaluation
    from embodyrl.training.ood import evaluate_ood, print_ood

    options: dict[str, Any] = {**asdict(dream_options(a)), **asdict(guidance_options(a))}
    options |= {"episodes": a.episodes, "seed": a.seed, "say": starting.say}
    if a.policy and (unread := _beside_a_file(a)):
        raise UserError(f"--policy acts as it was exported, so {unread} is not read. Leave it out.")
    options |= {"exported": a.policy} if a.policy else {}
    tables = {"--ood": a.ood, "--ablate": a.ablate}
    chosen = [name for name, given in tables.items() if given]
    if len(chosen) > 1:
        raise UserError("--ood and --ablate are two tables: ask for one of them.")
    if chosen and (a.video or a.attempts != 1):
        raise UserError(
            f"{chosen[0]} takes neither --video nor --attempts: score one split for those."
        )
    # All splits, all inputs, or one score.
    if a.ood:
        print_as(a, evaluate_ood(a.checkpoint, a.overrides, **options), print_ood)
    elif a.ablate:
        print_as(a, ablate_inputs(a.checkpoint, a.overrides, **options), print_ablation)
    else:
        options |= {"video": a.video, "attempts": a.attempts}
        print_as(a, evaluate_checkpoint(a.checkpoint, a.overrides, **options), print_evaluation)
    return 0
