"""What the commands do: ``serve``, ``deploy``, ``record``, ``act``, ``operator`` and ``twin``."""

from embodyrl.real_robot.commands.act import act_for, remote_actor
from embodyrl.real_robot.commands.deploy import deploy_checkpoint, score_line
from embodyrl.real_robot.commands.operator import serve_arms_page
from embodyrl.real_robot.commands.serve import serve_checkpoint
from embodyrl.real_robot.commands.signals import sigterm_is_ctrl_c
from embodyrl.real_robot.commands.twin import run_twin

__all__ = [
    "act_for",
    "deploy_checkpoint",
    "remote_actor",
    "run_twin",
    "score_line",
    "serve_arms_page",
    "serve_checkpoint",
    "sigterm_is_ctrl_c",
]
