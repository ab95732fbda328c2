"""A policy made better by what is imagined, from nothing, beside RL in the simulator that it imagines.

    python benchmarks/imagination.py --seeds 0 1 2                           # pick up the named block, MuJoCo
    python benchmarks/imagination.py --task maniskill_pushcube_rgb
    python benchmarks/imagination.py --task libero_object                    # three tasks, two 64x64 cameras
    python benchmarks/imagination.py --task libero_object_128                # from 128x128: better on a GPU
    python benchmarks/imagination.py --seeds 0 --tiny --out /tmp/tried       # the whole way in minutes, for nothing

Each seed: demonstrations and imitation (as in the quickstart); a noisy expert's episodes and
``embodyrl world loop`` (the policy's own, world model, SAC-Flow in the dream, round after round;
the model learns the simulator's state, and critics read it: an upper bound);
the world model's measures on episodes of its own; and, from the same imitated policy, SAC-Flow in
the simulator with as many real steps as the loop took in all, and with as many minutes. Everything
goes to ``OUT/TASK/SEED``, can be interrupted and goes on with the same command; the result is
``benchmarks/imagination_TASK.json`` and
``docs/images/imagination_TASK.png``. Seeds that are in that file already stay in it,
so they may be run one after the other or side by side, on several machines too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from figures import draw_json

from embodyrl.config import compose
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.dreams.loop_config import read_loop
from embodyrl.functional.intervals import bootstrap_iqm, format_rate, wilson
from embodyrl.storage.loggers import read_metrics
from embodyrl.storage.provenance import git_commit, hardware, versions

HERE = Path(__file__).parent
TRIED = ("--keep-failures", "--past-success", "5")
HIDDEN = "policy.critic=privileged"
"""Critics read the simulator's state, in dreams as the model predicts it; presets do not: an upper bound."""
DEPTH = 80
"""Actions of the longest dreams whose pictures are measured."""


@dataclass(frozen=True)
class Task:
    """A real env and how much is asked of it.

    Attributes:
        title: of the figure.
        collect: what ``embodyrl collect`` calls it.
        imitation: preset.
        simulator: preset of SAC-Flow in the real env.
        env: its settings in both of them.
        demos: demonstrations.
        shown: a noisy expert's episodes, failures among them, that the world model learns from
            besides.
        noise: of that expert, such that it fails about half of the time.
        judged: episodes of each policy that is compared in the dream and really.
    """

    title: str
    collect: tuple[str, ...]
    imitation: str
    simulator: str
    env: tuple[str, ...] = ()
    demos: int = 100
    shown: int = 200
    noise: float = 0.5
    judged: int = 128


LIBERO = ("libero", "env.suite=libero_object", "env.task_ids=[0,1,2]", "env.num_envs=24")
TASKS = {
    "mujoco_pick": Task(
        "pick up the named block, "
        "pixels", ("mujoco", "env.task=pick", "env.max_blocks=2"), "mujoco_pick_sft",
        "mujoco_pick_sac_flow",
    ),
    "mujoco_pick_few": Task(
        "the same from a third of the real "
        "episodes", ("mujoco", "env.task=pick", "env.max_blocks=2"),
        "mujoco_pick_sft", "mujoco_pick_sac_flow", shown=60,
    ),
    "maniskill_pushcube_rgb": Task(
        "ManiSkill's PushCube-v1, "
        "pixels", ("maniskill", "env.task=PushCube-v1", "env.obs=rgb", "env.num_envs=32"),
        "maniskill_pushcube_rgb_sft", "maniskill_pushcube_rgb_sac_flow", demos=16, shown=100,
    ),
    "libero_object": Task(
        "three tasks of LIBERO-Object, two 64x64 "
        "cameras", (*LIBERO, "env.image_size=64"), "libero_object_sft",
        "libero_object_sac_flow", demos=15, shown=60, noise=0.15, judged=48,
    ),
    "libero_object_128": Task(
        "three tasks of LIBERO-Object, two 128x128 "
        "cameras", (*LIBERO, "env.image_size=128"), "libero_object_sft",
        "libero_object_sac_flow", ("env.image_size=128",), demos=30, noise=0.2,
    ),
}  # fmt: skip
"""The name is also that of the loop's preset."""
TINY = {
    "demos": 8, "shown": 16, "held_out": 8, "env": ("env.num_envs=8",),
    "sft": ["run.iterations=1", "run.eval_episodes=8", "algorithm.steps_per_iteration=20"],
    "loop": [
        "rounds=2", "first_episodes=8", "episodes=8", "segment=8", "segments=1", "select_episodes=8",
        "eval_episodes=8", "near=0.5", "gate=warn", "gate_states=8",
        "world=[steps=300,codec_steps=60,state_steps=1000,inverse_steps=50,batch_size=32,width=32,layers=1,channels=32,max_false_positives=1.0,held_out=0.5]",
        "refresh=[steps=5,state_steps=200,inverse_steps=50,max_false_positives=1.0,held_out=0.5]",
        "dream_overrides=[env.num_envs=4,algorithm.num_chunks=2,algorithm.warmup_chunks=16,algorithm.batch_size=8]",
    ],
    "world_episodes": 8,
    "deep": 8,
    "simulator": [
        "env.num_envs=4", "algorithm.num_chunks=8", "algorithm.warmup_chunks=32", "algorithm.batch_size=8",
        "run.eval_episodes=8", "run.videos=0",
    ],
    "iterations": 1,
    "minutes": 0.05,
}  # fmt: skip
FULL = {
    "held_out": 200, "env": (), "sft": [], "loop": [], "deep": 64,
    # More gradient steps per env step than the preset: real steps are what is counted here.
    "simulator": ["run.eval_every=0", "algorithm.utd=0.5", "algorithm.warmup_chunks=1024"],
    "iterations": 0, "minutes": 0.0,
}  # fmt: skip
"""0 iterations and minutes mean as many as the loop took."""


def embodyrl(folder: Path, stage: str, *arguments: str, capture: bool = False) -> str:
    """Runs a command and returns its output where that is captured; its minutes are added to the stage's."""
    path = folder / "minutes.json"
    minutes = json.loads(path.read_text()) if path.exists() else {}
    began = time.monotonic()
    output = subprocess.PIPE if capture else None
    done = subprocess.run(
        [sys.executable, "-m", "embodyrl.cli", *arguments], check=False, stdout=output, text=True
    )
    path.write_text(
        json.dumps(minutes | {stage: minutes.get(stage, 0.0) + (time.monotonic() - began) / 60})
    )
    if done.returncode:
        raise SystemExit(
            f"{folder}: stopped at {stage}, see above. The same command goes on from there."
        )
    return done.stdout or ""


def collect(folder: Path, name: str, task: Task, *arguments: str) -> Path:
    """A data set, unless it is there."""
    if not (folder / name).exists():
        embodyrl(folder, "data", "collect", *task.collect, *arguments, "--out", str(folder / name))
    return folder / name


def run(folder: Path, name: str, seed: int, size: dict, beside: list[str]) -> dict:
    """One seed of a task, or what is left of it."""
    folder.mkdir(parents=True, exist_ok=True)
    task, sft, loop = TASKS[name], folder / "sft", folder / "loop"
    asked = {"demos": size.get("demos", task.demos), "shown": size.get("shown", task.shown)}
    env = [*task.env, *size["env"]]
    careful = ("--noise", "0.15", "--episodes", str(asked["demos"]), "--seed", str(seed))
    demos = collect(folder, "demos", task, *size["env"], *careful)
    common = [f"run.out={folder}", f"run.seed={seed}", *env]
    imitate = [*common, "run.name=sft", f"data.path={demos}", f"env.seed={seed}", *size["sft"]]
    embodyrl(folder, "imitation", "train", task.imitation, *imitate)
    noisy = (
        "--noise",
        str(task.noise),
        "--episodes",
        str(asked["shown"]),
        "--seed",
        str(200 + seed),
    )
    shown = collect(folder, "shown", task, *size["env"], *TRIED, *noisy)
    how = [f"policy={sft}", f"data=[{shown}]", f"demos={demos}", f"out={loop}", f"seed={seed}"]
    how += [f"env_overrides=[{','.join(env)}]"] * bool(env) + size["loop"]
    in_dream = [*read_loop(name, how).dream_overrides, HIDDEN]
    how.append(f"dream_overrides=[{','.join(in_dream)}]")
    embodyrl(folder, "loop", "world", "loop", name, *how)
    book = json.loads((loop / "loop.json").read_text())

    # Loops of before the gate have no steps of it.
    steps = book["real_steps"] + book["eval_steps"] + book.get("gate_steps", 0)
    minutes = sum(book["minutes"].values())
    preset = compose(task.simulator, [])
    an_iteration = preset.env.num_envs * preset.algorithm.num_chunks * preset.policy.horizon
    budgets = {
        "same_steps": [f"run.iterations={size['iterations'] or -(-steps // an_iteration)}"],
        "same_minutes": ["run.iterations=100000", f"run.minutes={size['minutes'] or minutes}"],
        "quarter_minutes": [
            "run.iterations=100000",
            f"run.minutes={(size['minutes'] or minutes) / 4}",
        ],
    }
    last_world = folder / "loop" / list(book["rounds"])[-1] / "world" / "model"
    world = measure(folder, task, seed, book, sft, size, last_world)
    deep = dream_deep(folder, task, seed, sft, size, last_world)
    simulator = {}
    for budget in beside:
        start = [f"run.init_checkpoint={sft}", f"run.name={budget}", f"data.path={demos}"]
        embodyrl(
            folder,
            budget,
            "train",
            task.simulator,
            *common,
            *start,
            HIDDEN,
            *budgets[budget],
            *size["simulator"],
        )
        last = json.loads((folder / budget / "evals" / "after.json").read_text())
        solved = sum(e["success"] for e in last["episodes"])
        simulator[budget] = {
            "solved": solved, "episodes": len(last["episodes"]), "interval": wilson(solved, len(last["episodes"])),
            "real_steps": last["env_steps"], "minutes": last["minutes"],
        }  # fmt: skip
    return {
        "seed": seed,
        "minutes": json.loads((folder / "minutes.json").read_text()),
        "loop": book,
        "simulator": simulator,
        "by_real_steps": by_real_steps(folder, book, simulator),
        "world": world,
        "deep": deep,
    }


def measure(
    folder: Path, task: Task, seed: int, book: dict, sft: Path, size: dict, model: Path
) -> dict:
    """What the last world model is worth, on episodes and policies of its own."""
    path = folder / f"world_eval_{model.parents[1].name}.json"  # a loop may be given further rounds
    if not path.exists():
        tried = ("--episodes", str(size["held_out"]), "--seed", str(300 + seed))
        held_out = collect(
            folder,
            "held_out",
            task,
            *size["env"],
            *TRIED,
            "--policy",
            str(sft),
            "--derail",
            "0.4",
            *tried,
        )
        looks = [look["checkpoint"] for looks in book["rounds"].values() for look in looks]
        policies = [looks[i] for i in sorted({round(x) for x in np.linspace(0, len(looks) - 1, 6)})]
        episodes = str(size.get("world_episodes", task.judged))
        how = ["--data", str(held_out), "--episodes", episodes, "--policies", *policies, "--json"]
        found = embodyrl(folder, "measures", "world", "eval", str(model), *how, capture=True)
        path.write_text(found.splitlines()[-1])
    return json.loads(path.read_text())


def dream_deep(folder: Path, task: Task, seed: int, sft: Path, size: dict, model: Path) -> dict:
    """Pictures by depth, on a few episodes that last longer than the task allows, and ``dreams.png`` of them."""
    path = folder / f"deep_eval_{model.parents[1].name}.json"
    if not path.exists():
        tried = (
            "--policy",
            str(sft),
            "--derail",
            "0.4",
            "--episodes",
            str(size["deep"]),
            "--seed",
            str(400 + seed),
        )
        deep = collect(
            folder, "deep", task, *size["env"], f"env.max_episode_steps={DEPTH}", *TRIED, *tried
        )
        how = ["--data", str(deep), "--pictures", str(folder / "dreams.png"), "--json"]
        found = embodyrl(folder, "measures", "world", "eval", str(model), *how, capture=True)
        path.write_text(found.splitlines()[-1])
    found = json.loads(path.read_text())
    return {"by_depth": found["by_depth"], "outcomes": found["outcomes"]}


def by_real_steps(folder: Path, book: dict, simulator: dict) -> dict[str, list]:
    """(real env steps, success) on the way: the loop's looks at the real env, and the simulator's training episodes.

    The loop's steps are those that it has learned from and looked with until then. The simulator's
    success is that of five iterations' episodes, or more until they are 64 (where they are long,
    the first to end are the solved ones), with exploration noise.
    """

    def recorded(path: Path) -> int:
        return len(open_dataset(path).columns["episode_index"]) if path.exists() else 0

    found: dict[str, list] = {"loop": []}
    steps = recorded(folder / "shown")
    for name, looks in book["rounds"].items():
        steps += sum(recorded(folder / "loop" / name / kind) for kind in ("tried", "near"))
        for look in looks:
            steps += look["steps"]
            found["loop"].append((steps, look["solved"] / look["episodes"]))
    for budget in simulator:
        rows = [
            row
            for row in read_metrics(folder / budget / "metrics.jsonl")
            if row.get("train_episodes")
        ]
        found[budget] = []
        for last in range(1, len(rows) + 1):
            first, episodes = last, 0
            while first and (last - first < 5 or episodes < 64):
                first -= 1
                episodes += rows[first]["train_episodes"]
            if last - first < 5 or episodes < 64:  # so early that there are no more
                continue
            solved = sum(row["train_success"] * row["train_episodes"] for row in rows[first:last])
            found[budget].append((rows[last - 1]["env_steps"], solved / episodes))
    return found


def rates(result: dict) -> dict[str, float]:
    """Real success on held-out states: the imitated policy, the loop's, the simulator's."""
    loop = result["loop"]
    found = {"imitated": loop["before"], "dream": loop["after"], **result["simulator"]}
    return {name: x["solved"] / x["episodes"] for name, x in found.items()}


def table(seeds: list[dict]) -> str:
    """What the JSON says, a column a seed, in Markdown."""
    rows: dict[str, list[str]] = {}
    for column, result in enumerate(seeds):
        loop, world, said = result["loop"], result["world"], {}
        said["imitation"] = format_rate(loop["before"]["solved"], loop["before"]["episodes"])
        said["`world loop`"] = format_rate(loop["after"]["solved"], loop["after"]["episodes"])
        said["its real env steps, to learn from and to choose by"] = (
            f"{loop['real_steps']:,} + {loop['eval_steps']:,}"
        )
        minutes = loop["minutes"]
        said["its minutes, of them world model and dream"] = (
            f"{sum(minutes.values()):.0f}: {minutes['world model']:.0f} + {minutes['dream']:.0f}"
        )
        for name, run in result["simulator"].items():
            said[f"simulator, {name.replace('_', ' ')}"] = (
                f"{format_rate(run['solved'], run['episodes'])}, {run['real_steps']:,} steps"
            )
        judge = world["as_evaluator"]
        said["policies in the dream and really: Pearson, Spearman, MMRV, mean error"] = ", ".join(
            short(judge[k]) for k in ("pearson", "spearman", "mmrv", "mean_error")
        )
        swapped = world["swapped_actions"]
        said["other episodes' actions solve, in the dream and really"] = (
            f"{swapped['imagined']:.1%}, {swapped['solved']:.1%}"
        )
        for at, after in enumerate((0, 2)):
            looks = [policy["believed"][at] for policy in judge["policies"]]
            both, all_ = (sum(look[k] for look in looks) for k in ("both", "imagined"))
            said[f"of the successes dreamt after {after} real chunks, true"] = f"{both} of {all_}"
        for kind in ("real", "imagined"):
            head = world["judged"]["head"][kind]
            ends = head["false_terminations"]
            said[f"success head on {kind} frames: F1, AUROC, ECE; failures that it ends"] = (
                ", ".join(short(head[k]["value"]) for k in ("f1", "auroc", "ece"))
                + f"; {ends['k']} of {ends['n']}"
            )
        for about in (5, 35, 65):
            depth = min(result["deep"]["by_depth"], key=lambda d: abs(d["steps"] - about))
            said[
                f"pictures after {depth['steps']} actions: PSNR, SSIM; PSNR of the codec, of a "
                "still picture"
            ] = f"{depth['psnr']:.1f}, {short(depth['ssim'])}; {depth['psnr_codec']:.1f}, {depth['psnr_still']:.1f}"
        for name, value in said.items():
            rows.setdefault(name, [""] * len(seeds))[column] = value
    head = ["", *(f"seed {result['seed']}" for result in seeds)]
    lines = [head, ["---"] * len(head), *([name, *values] for name, values in rows.items())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def short(number: float | None) -> str:
    """Two digits, without a zero before the point; a dash where there is none, as of F1 where nothing was solved."""
    return "-" if number is None else f"{number:.2f}".replace("0.", ".", 1)


def main() -> None:
    """Runs seeds, and writes JSON and figure after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default="mujoco_pick")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/imagination"))
    parser.add_argument(
        "--beside", nargs="*", choices=("same_steps", "same_minutes", "quarter_minutes"),
        default=["same_steps", "same_minutes"],
        help="runs in the simulator to compare with (default: the first two; where the simulator is ahead after a "
        "quarter of the loop's minutes, all of them need not be waited for)",
    )  # fmt: skip
    parser.add_argument(
        "--tiny", action="store_true", help="so small that it means nothing; results stay in --out"
    )
    parser.add_argument("overrides", nargs="*", help="of the loop, e.g. rounds=4")
    a = parser.parse_args()
    size = TINY if a.tiny else FULL
    size = size | {"loop": [*size["loop"], *a.overrides]}
    for seed in a.seeds:
        folder = a.out / a.task / str(seed)
        done = run(folder, a.task, seed, size, a.beside)
        done |= {"commit": git_commit(), "versions": versions(), "hardware": hardware()}
        publish(done, a.task, folder / "dreams.png", a.out if a.tiny else HERE)


def publish(done: dict, task: str, dreams: Path, where: Path) -> None:
    """Adds a seed to what is known of its task, and draws and prints that anew."""
    path = where / f"imagination_{task}.json"
    known = json.loads(path.read_text())["seeds"] if path.exists() else []
    others = [result for result in known if result["seed"] != done["seed"]]
    seeds = sorted([*others, done], key=lambda result: result["seed"])
    every = [rates(result) for result in seeds]
    iqm = {
        name: bootstrap_iqm([x[name] for x in every])
        for name in every[0]
        if all(name in x for x in every)
    }
    title = f"Better by what is imagined, with the simulator's state: {TASKS[task].title}"
    path.write_text(json.dumps({"title": title, "iqm": iqm, "seeds": seeds}, indent=1))
    draw_json(path, "imagination")
    if done is seeds[0]:
        shutil.copy(dreams, where / f"imagination_{task}_dreams.png")
    print(table(seeds))
    for name, (middle, low, high) in iqm.items():
        print(
            f"{name}: {middle:.0%} [{low:.0%}, {high:.0%}], interquartile mean and its bootstrap "
            "interval"
        )


if __name__ == "__main__":
    main()
