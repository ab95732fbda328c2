"""SmolVLA's architecture, small and from nothing, on LIBERO: scripted demonstrations, imitation, then PPO.

    python benchmarks/libero_smolvla.py --seeds 0 1 2
    python benchmarks/libero_smolvla.py --seeds 0 --width 128 --layers 4 run.iterations=80

Three tasks of LIBERO-Object, two 64x64 cameras, official initial states that were never trained on.
Runs go to ``runs/bench/libero_smolvla/SEED`` and can be interrupted and resumed; the result is
``benchmarks/libero_smolvla.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from post_train import embodyrl, read

from embodyrl.functional.intervals import bootstrap_iqm
from embodyrl.storage.provenance import hardware, versions
from embodyrl.training.run_folder import finished

HERE = Path(__file__).parent
ENV = ("env.suite=libero_object", "env.task_ids=[0,1,2]", "env.image_size=64")
PRESET = """
env: {name: libero, suite: libero_object, task_ids: [0, 1, 2], image_size: 64, num_envs: 48}
"""
SFT = """
policy: {name: smolvla, random_weights: true, horizon: 8, num_denoise_steps: 4, train: all, critic: privileged}
algorithm: {name: sft, lr: 1.0e-3, steps_per_iteration: 100, batch_size: 128}
run: {name: sft, iterations: 24, eval_every: 0, checkpoint_every: 6, eval_episodes: 90}
"""
PPO = """
policy: {name: smolvla}
algorithm: {name: ppo, num_chunks: 24, epochs: 3, critic_epochs: 20, gamma: 0.995, gae_lambda: 0.95, lr: 1.0e-4}
run: {name: rl, iterations: 40, eval_every: 10, checkpoint_every: 2, eval_episodes: 90}
"""


def instructions() -> list[str]:
    """Of the suite's tasks: the words of the tokenizer."""
    from embodyrl.registry import tasks_module

    tasks = tasks_module("libero")
    assert tasks is not None
    return [task.instruction for task in tasks.list_tasks() if task.group == "libero_object"]


def run(seed: int, args: argparse.Namespace) -> Path:
    """One seed, or what is left of it; returns its folder."""
    folder = Path("runs/bench/libero_smolvla") / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    if finished(folder / "rl"):
        return folder
    model = folder / "architecture"
    if not (model / "config.json").exists():
        from embodyrl.policies.vla.make_small import make_small_smolvla

        make_small_smolvla(model, instructions(), width=args.width, layers=args.layers)
    for name, text in (("sft", SFT), ("ppo", PPO)):
        (folder / f"{name}.yaml").write_text(PRESET + text)
    if not (folder / "demos").exists():
        options = (
            "--episodes",
            str(args.demos),
            "--noise",
            "0.1",
            "--seed",
            str(seed),
            "--out",
            str(folder / "demos"),
        )
        embodyrl(folder, "collect", "libero", *ENV, "env.num_envs=15", *options)
    common = [f"run.out={folder}", f"run.seed={seed}", f"env.seed={seed}"]
    given = [f"policy.pretrained={model.resolve()}", f"data.path={folder / 'demos'}"]
    embodyrl(folder, "train", str(folder / "sft.yaml"), *common, *given)
    rl = [f"run.init_checkpoint={folder / 'sft'}", *args.overrides]
    embodyrl(folder, "train", str(folder / "ppo.yaml"), *common, *rl)
    return folder


def main() -> None:
    """Runs all seeds, then writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--demos", type=int, default=30)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="for the RL run, e.g. run.iterations=100")
    args = parser.parse_args()
    seeds = []
    for seed in args.seeds:
        seeds.append(read(run(seed, args), seed))
        scores = {when: [s[when][0] / s[when][1] for s in seeds] for when in ("before", "after")}
        result = {
            "title": "LIBERO-Object, three tasks, two 64x64 cameras: a small SmolVLA from nothing, "
            "privileged critic",
            "settings": {k: v for k, v in vars(args).items() if k != "seeds"},
            "iqm": {when: bootstrap_iqm(x) for when, x in scores.items()},
            "seeds": seeds,
            "versions": versions(),
            "hardware": hardware(),
        }
        (HERE / "libero_smolvla.json").write_text(json.dumps(result, indent=1))
        print(json.dumps({k: result[k] for k in ("title", "iqm")}), flush=True)


if __name__ == "__main__":
    main()
