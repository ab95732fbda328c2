"""For ``robot_clients.py``: the simulated arm as a LeRobot ``Robot``, our policy in LeRobot's asynchronous server."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_here = os.getcwd()
os.chdir(
    tempfile.mkdtemp()
)  # LeRobot writes logs into the working directory as soon as it is imported
from lerobot.async_inference import policy_server, robot_client  # noqa: E402
from lerobot.async_inference.configs import PolicyServerConfig  # noqa: E402
from lerobot.robots.config import RobotConfig  # noqa: E402
from lerobot.robots.robot import Robot  # noqa: E402
from lerobot.transport import services_pb2  # noqa: E402

os.chdir(_here)
logging.disable(logging.INFO)


@RobotConfig.register_subclass("embodyrl_twin")
@dataclass(kw_only=True)
class TwinConfig(RobotConfig):
    """The arm and the pilot of an episode."""

    arm: Any = None
    pilot: Any = None


class Twin(Robot):
    """See ``lerobot.robots.Robot``; ends the client's loop when the episode is over."""

    config_class, name = TwinConfig, "embodyrl_twin"

    def __init__(self, config: TwinConfig) -> None:
        super().__init__(config)
        self.arm, self.pilot, self.end = config.arm, config.pilot, lambda: None
        told = self.arm.told
        self._state = [f"state_{k}" for k in range(told["proprio_dim"])]
        self._axes = [f"action_{k}" for k in range(told["action_dim"])]

    @property
    def observation_features(self) -> dict[str, Any]:
        cameras = {name: (*size, 3) for name, size in self.arm.told["cameras"].items()}
        return {**dict.fromkeys(self._state, float), **cameras}

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(self._axes, float)

    is_connected = is_calibrated = property(lambda self: True)

    def connect(self, calibrate: bool = True) -> None:
        pass

    calibrate = configure = disconnect = lambda self: None

    def get_observation(self) -> dict[str, Any]:
        self._look()
        seen = self.arm.rig.robot.observe(self.pilot.decoder)
        state = (1e3 * seen["proprio"]).tolist()  # mm
        return {**dict(zip(self._state, state, strict=True)), **seen["images"]}

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        self.arm.act(self.pilot, np.array([action[name] for name in self._axes]))
        self._look()
        return action

    def _look(self) -> None:
        if self.arm.over(self.pilot):
            self.end()


def client_class() -> type:
    """LeRobot's client, which notes how old an observation is when its chunk comes, and ends with the episode."""

    class Client(robot_client.RobotClient):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.trips: list[float] = []
            self.robot.end = self.shutdown_event.set
            self._chunks = 0

        def _aggregate_action_queues(self, incoming_actions: Any, aggregate_fn: Any = None) -> None:
            if self._chunks:
                self.trips.append(time.time() - incoming_actions[0].get_timestamp())
            self._chunks += 1
            super()._aggregate_action_queues(incoming_actions, aggregate_fn)

    return Client


def server_class() -> type:
    """LeRobot's server, in which the network, and what it is fed, are ours."""

    class Server(policy_server.PolicyServer):
        def __init__(self, policy: Any, delay: float) -> None:
            super().__init__(PolicyServerConfig(inference_latency=0.0, obs_queue_timeout=0.5))
            self.ours, self.delay = policy, delay

        def SendPolicyInstructions(self, request: Any, context: Any) -> Any:
            state = [f"state_{k}" for k in range(self.ours.metadata["proprio_dim"])]
            self.lerobot_features = {
                "observation.state": {"dtype": "float32", "shape": (len(state),), "names": state}
            }  # all that the filter of similar observations reads
            self.last_processed_obs = None
            return services_pb2.Empty()

        def _predict_action_chunk(self, observation_t: Any) -> Any:
            raw, due = observation_t.get_observation(), time.monotonic() + self.delay
            self.last_processed_obs = observation_t
            state = [raw[f"state_{k}"] for k in range(self.ours.metadata["proprio_dim"])]
            answer = self.ours.infer(
                {
                    "images": {
                        name: np.asarray(raw[name]) for name in self.ours.metadata["cameras"]
                    },
                    "proprio": np.array(state, np.float32) / 1e3,
                    "prompt": raw["task"],
                }
            )
            actions = [torch.from_numpy(action) for action in answer["actions"]]
            time.sleep(
                max(0.0, due - time.monotonic())
            )  # its own latency counts the wait for an observation too
            return self._time_action_chunk(
                observation_t.get_timestamp(), actions, observation_t.get_timestep()
            )

    return Server
