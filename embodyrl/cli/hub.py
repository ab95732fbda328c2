"""``embodyrl export``, ``push`` and ``pull``: exchange with LeRobot and the Hugging Face hub."""

from __future__ import annotations

import argparse
import shlex

from embodyrl.cli.verbs import CHECKPOINT, Verb
from embodyrl.errors import UserError

EXPORT_HELP = """examples:
  embodyrl export runs/my_smolvla out/my_smolvla
  embodyrl export runs/my_smolvla out/my_smolvla --profile libero_lerobot
      for LeRobot's own LIBERO, whose pictures are mirrored, of a policy that was trained on others
LeRobot then loads the folder: lerobot-eval --policy.path=out/my_smolvla ...
An OpenVLA is written as its checkpoints are published.
  embodyrl export runs/mujoco_pick_pa_rl --to arm.onnx
      one file that onnxruntime runs without PyTorch, of a flow_vla or flow_mlp
  embodyrl export runs/hopper --to arm.npz       for numpy alone, of a flow_mlp; .c is C99
"""
PUSH_HELP = """examples:
  embodyrl push runs/mujoco_pick_ppo you/my_policy
  embodyrl push runs/mujoco_pick_ppo you/my_policy --dry-run    files, sizes and model card
It uploads weights, config, evaluations and a model card. A new repository is private by default.
Log in first: hf auth login. The environment variable HF_ENDPOINT selects another hub.
"""
PULL_HELP = """examples:
  embodyrl pull you/my_policy my_policy       then: embodyrl eval my_policy
For a private repository, log in first: hf auth login. The environment variable HF_ENDPOINT selects
another hub.
"""


def add_exchange_verbs(verb: Verb) -> None:
    """Adds ``export``, ``push`` and ``pull`` to the parser."""
    _add_export(verb)
    _add_hub(verb)


def _add_export(verb: Verb) -> None:
    text = (
        "Writes a SmolVLA, pi0 or pi0.5 policy as a checkpoint of LeRobot, or a small flow policy "
        "as one file that runs without PyTorch."
    )
    sub = verb("export", _export, text, EXPORT_HELP, torch="yes")
    sub.add_argument("checkpoint", help=CHECKPOINT)
    sub.add_argument("out", nargs="?", default="", help="the folder to write")
    text = "write a file in place of the folder; it ends in .onnx, .npz or .c"
    sub.add_argument("--to", default="", metavar="FILE", help=text)
    text = (
        "a public family whose pictures and names of cameras the checkpoint shall take (default: "
        "those of the training)"
    )
    sub.add_argument("--profile", default="", metavar="NAME", help=text)


def _add_hub(verb: Verb) -> None:
    text = "Uploads a checkpoint and its evaluations to the Hugging Face hub."
    sub = verb("push", _push, text, PUSH_HELP, torch="yes")
    sub.add_argument("checkpoint", help=CHECKPOINT)
    sub.add_argument("repo", help="OWNER/NAME; it is created if it does not exist")
    sub.add_argument("--public", action="store_true", help="create a public repository")
    text = "say what would be uploaded, and upload nothing; it needs no network and no login"
    sub.add_argument("--dry-run", action="store_true", help=text)

    text = "Downloads a checkpoint that was uploaded with push."
    sub = verb("pull", _pull, text, PULL_HELP, torch="yes")
    sub.add_argument("repo", help="OWNER/NAME")
    sub.add_argument("out", help="the folder to write")
    sub.add_argument("--revision", default="", help="a branch, tag or commit")


def _export(a: argparse.Namespace) -> int:
    if bool(a.out) == bool(a.to):
        raise UserError("Give either a folder, for LeRobot, or --to FILE.")
    # One file that runs without PyTorch, or a folder for LeRobot or OpenVLA's code.
    if a.to:
        from embodyrl.training.export_file import export_file

        if a.profile:
            raise UserError("--profile is for LeRobot's checkpoints. Leave it or --to out.")
        print("Wrote " + " and ".join(map(str, export_file(a.checkpoint, a.to))))
        return 0
    from embodyrl.training.export import export, remark

    print(f"Wrote {export(a.checkpoint, a.out, a.profile)}")
    if text := remark(a.out):
        print(text)
    return 0


def _push(a: argparse.Namespace) -> int:
    from embodyrl.training.hub import preview, push

    if a.dry_run:
        print(preview(a.checkpoint, a.repo, public=a.public))
    else:
        print(f"Pushed: {push(a.checkpoint, a.repo, public=a.public)}")
    return 0


def _pull(a: argparse.Namespace) -> int:
    from embodyrl.training.hub import pull

    folder = pull(a.repo, a.out, revision=a.revision)
    print(f"Wrote {folder}. Score it with: embodyrl eval {shlex.quote(str(folder))}")
    return 0
