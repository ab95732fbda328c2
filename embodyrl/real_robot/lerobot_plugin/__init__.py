r"""A plug-in for LeRobot's commands: our arms, and the simulated one, as a LeRobot robot.

    lerobot-record --robot.discover_packages_path=embodyrl.real_robot.lerobot_plugin \
        --robot.type=embodyrl --robot.arm=twin --robot.overrides='[env.task=reach]' \
        --teleop.type=embodyrl --teleop.device=scripted \
        --dataset.repo_id=me/reach --dataset.root=data/reach --dataset.fps=25 \
        --dataset.single_task="reach the green ball" --dataset.push_to_hub=false

``lerobot-teleoperate`` and ``lerobot-replay`` take the same ``--robot.`` and ``--teleop.`` words.
"""

# LeRobot looks for a device's class beside its config's module: here.
from embodyrl.real_robot.lerobot_plugin.arm import EmbodyrlArm as EmbodyrlArm
from embodyrl.real_robot.lerobot_plugin.arm import EmbodyrlArmConfig as EmbodyrlArmConfig
from embodyrl.real_robot.lerobot_plugin.person import EmbodyrlPerson as EmbodyrlPerson
from embodyrl.real_robot.lerobot_plugin.person import EmbodyrlPersonConfig as EmbodyrlPersonConfig
