"""What a round learns from, and how: imitation, or off-policy RL on what was recorded.

    imitate   a person's turns (corrections and ways back), what the policy solved alone, and the
              demonstrations: half of every batch from the rounds (HG-DAgger, RaC)
    rl        PA-RL on all of it, the policy's failed turns too (``algorithms.pa_rl_offline``)
    edit      the same, but the policy's own weights stay as they are: critics choose among what it
              proposes, and a small actor edits it

None of them asks for more than the robot has: critics see the features that the policy sees. The last
two say whether critics of so many episodes help (``algorithms.gate``); those that cannot tell choose
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodyrl import registry
from embodyrl.algorithms.gate import VERDICTS
from embodyrl.build import load_spec
from embodyrl.config import Config, resolve
from embodyrl.errors import UserError
from embodyrl.storage import checkpoint
from embodyrl.storage.loggers import read_metrics
from embodyrl.storage.preset_files import apply_overrides
from embodyrl.storage.run_files import read_meta
from embodyrl.training.run_folder import finished
from embodyrl.training.runner import train

METHODS: dict[str, str] = {"imitate": "sft", "rl": "pa_rl_offline", "edit": "pa_rl_offline"}
"""How a policy learns, and by which algorithm."""
CHOOSER = {"chooser_width": 256, "proposals": 16}
"""What a policy needs in order to choose, where its checkpoint has nothing of it."""
EDIT_SCALE = 0.3
"""How far an edit goes from a proposal, in units of the action."""


def learner_config(
    policy: str,
    method: str,
    overrides: Sequence[str],
    data: Sequence[tuple[str, float]],
    folder: Path,
    seed: int,
) -> Config:
    """The config of a round's training.

    Args:
        policy: run or checkpoint that it starts from.
        method: one of ``METHODS``.
        overrides: of this config.
        data: data sets, with their shares of every batch.
        folder: of the round.
        seed: of the training.

    Raises:
        UserError: a setting that cannot be, or an algorithm that plays while it learns.
    """
    _, meta = checkpoint.load_run(checkpoint.find(policy), "config")
    raw: dict[str, Any] = {name: dict(meta["config"][name]) for name in ("env", "policy")}
    # Nothing is played, so no reflector is asked.
    raw["env"] |= {"reflector": "", "progress_coef": 0.0}
    _check_algorithm(method, overrides)
    # 1. The algorithm, with its own settings if the checkpoint comes from it.
    before = dict(meta["config"]["algorithm"])
    name = METHODS[method]
    raw["algorithm"] = before if before.get("name") == name else {"name": name}
    paths = [path for path, _ in data]
    raw["data"] = {"path": paths[0] if paths else "", "more": paths[1:]}
    # The weights and the normalisation go on from the checkpoint.
    if method == "imitate":
        raw["algorithm"] |= {"fit_inputs": False}
        raw["data"] |= {"weights": [share for _, share in data], "intervention_weight": 2.0}
    # Critics learn from failed turns, too, and the policy needs a chooser. Rounds are short, so
    # critics must show that they can tell.
    else:
        raw["algorithm"] |= {"gate": "require"}
        raw["data"] |= {"keep": "all"}
        own = raw["policy"]
        raw["policy"] = own | {k: v for k, v in CHOOSER.items() if not own.get("chooser_width")}
    # An editor beside a policy whose own weights are left alone.
    if method == "edit":
        raw["algorithm"] |= {"actor_share": 0.0}
        raw["policy"].setdefault("edit_scale", EDIT_SCALE)
        raw["policy"]["edit_scale"] = raw["policy"]["edit_scale"] or EDIT_SCALE
    # 2. The run: its end is its only checkpoint.
    raw["run"] = {
        "iterations": 40,
        "seed": seed,
        "eval_every": 0,
        "videos": 0,
        "checkpoint_every": 1_000_000,
        "keep_checkpoints": 1,
        "threads": meta["config"]["run"].get("threads", 0),
    }
    merged = apply_overrides(raw, overrides)
    own = {"run.out": folder, "run.name": "learn", "run.init_checkpoint": policy}
    return resolve(merged, [f"{key}={value}" for key, value in own.items()])


def _check_algorithm(method: str, overrides: Sequence[str]) -> None:
    """Refuses another algorithm than the method's.

    Raises:
        UserError: saying where it has its place.
    """
    for name in (o.partition("=")[2] for o in overrides if o.startswith("algorithm.name=")):
        if registry.load("algorithms", name).plays:
            raise UserError(
                f"algorithm.name={name} plays while it learns, and a round learns from what was "
                "recorded in it. Leave it out; for learning on the arm while it moves see "
                "`embodyrl train robot_pick_rlpd`."
            )
        if name != METHODS[method]:
            raise UserError(
                f"--method {method} learns by {METHODS[method]}, not by {name}: leave "
                f"algorithm.name out, or choose among --method {', '.join(METHODS)}."
            )


def learn(config: Config, policy: str, command: str) -> str | None:
    """Trains, or goes on; the robot is not touched.

    Args:
        config: of ``learner_config``.
        policy: that it starts from.
        command: as the user typed it.

    Returns:
        The new run's folder; None where it was interrupted.
    """
    folder = config.run.folder
    if not finished(folder):
        train(config, command=command, spec=load_spec(policy))
    return str(folder) if finished(folder) else None


def gate_said(run: str) -> dict[str, str]:
    """``says``, the gate's verdict on a run, and ``why``; empty where it was not asked."""
    folder = Path(run)
    why = read_meta(folder / "meta.json").get("verdict", "")
    if not why:
        return {}
    # A gate that had too few episodes to ask has no figure.
    last = read_metrics(folder / "metrics.jsonl")[-1]
    return {"says": VERDICTS[int(last.get("gate", 0))], "why": why}
