"""The policy of a checkpoint, as ``PolicyServer`` serves it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from embodyrl.build import load_config, load_policy, load_spec
from embodyrl.detectors.folder import check_detector, load_detector
from embodyrl.devices import use_device
from embodyrl.errors import UserError
from embodyrl.policies.guidance import GuidedPolicy
from embodyrl.policy import num_executed
from embodyrl.real_robot.policy_link.dream_options import NO_DREAM, DreamOptions
from embodyrl.real_robot.policy_link.guidance_options import NO_GUIDANCE, GuidanceOptions
from embodyrl.real_robot.policy_link.metadata import policy_facts
from embodyrl.real_robot.policy_link.monitors import (
    DetectorMonitor,
    Monitor,
    first_reason,
    request_obs,
)
from embodyrl.real_robot.policy_link.real_time_chunking import (
    CANDIDATES,
    nearest,
    rtc_weights,
    sample_after,
    sample_guided,
)
from embodyrl.types import Obs
from embodyrl.world_models.dream_chooser import DreamChooser
from embodyrl.world_models.model import WorldModel


class CheckpointPolicy:
    """Noise-free action chunks of a checkpoint's policy.

    Args:
        path: a checkpoint, or a run's folder (its newest).
        device: ``"auto"`` takes the GPU where there is one.
        seed: of the noise that flow policies start from.
        monitors: each looks at every chunk and may ask for a person; the answer then has the
            reason as ``ask``.
        detectors: folders of failure detectors, which are further monitors.
        dream: lets a world model choose among several proposals.
        overrides: ``policy.key=value``, of the config that it was trained with.
        guidance: mixes in the policy that training began with.

    Attributes:
        metadata: what a server tells its clients about the policy. ``horizon`` is the number of
            actions of a chunk, and ``execute`` how many of them it was trained to have executed.
    """

    def __init__(
        self,
        path: str,
        device: str = "auto",
        seed: int = 0,
        monitors: Sequence[Monitor] = (),
        detectors: Sequence[str] = (),
        dream: DreamOptions = NO_DREAM,
        overrides: Sequence[str] = (),
        guidance: GuidanceOptions = NO_GUIDANCE,
    ) -> None:
        # The checkpoint says which policy it is, and the env that it was made for.
        self.config = load_config(path, overrides)
        self.spec = load_spec(path)
        if self.spec.history > 1:
            raise UserError(
                f"{path} sees {self.spec.history} observations at once, and a robot sends the "
                "present one. Export it, and run it with LeRobot; or train it with env.history=1."
            )
        self.device = use_device(device, "--device")
        self.policy: Any = load_policy(path, self.config.policy, self.spec, 0, self.device)
        self.policy.eval()
        self._guided = self._guide(guidance, dream)
        # It dreams of the executed actions, so it is built before the plan is sent whole.
        self._dream: DreamChooser | None = None
        if dream.dream:
            model = WorldModel.load(dream.dream, self.device)
            self._dream = DreamChooser(self.policy, model, dream.proposals, dream.margin)
        self._generator = torch.Generator().manual_seed(seed)
        self.monitors = [*monitors]
        for folder in detectors:
            detector = load_detector(folder, self.device)
            check_detector(detector, folder, self.policy, path)
            self.monitors.append(DetectorMonitor(detector, self.policy, self.device, seed))
        execute = num_executed(self.policy.config)
        # A client gets the whole plan, also what lies beyond the actions that are to be executed:
        # real-time chunking continues it. A chooser knows the executed actions alone.
        if hasattr(self.policy.config, "execute") and getattr(self.policy, "chooser", None) is None:
            config = self.policy.config
            self.policy.config = dataclasses.replace(config, execute=config.horizon)
        sent = num_executed(self.policy.config)
        self.metadata = policy_facts(self.spec) | {"horizon": sent, "execute": execute}
        if longest := getattr(self.policy.config, "max_prefix", 0):
            self.metadata["max_prefix"] = longest

    def _guide(self, guidance: GuidanceOptions, dream: DreamOptions) -> GuidedPolicy | None:
        """The policy with the base mixed in; None without a base.

        Raises:
            UserError: a dream shall choose as well, or the two do not go together.
        """
        if not guidance.base:
            return None
        if dream.dream:
            raise UserError(
                "--dream chooses among proposals of one policy, and --base mixes two. Leave one "
                "of them out."
            )
        # The base acts in the same env, from the same noise.
        config = load_config(guidance.base)
        base = load_policy(guidance.base, config.policy, self.spec, 0, self.device)
        return GuidedPolicy(self.policy, base, guidance.guidance)

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Infers the next chunk.

        Args:
            observation: as ``server.check_observation`` accepts it.

        Returns:
            ``actions`` (H, A) float32, and ``ask`` where a monitor asks for a person.
        """
        obs = request_obs(observation, self.device)
        if "previous" in observation:
            actions = self._continued(obs, observation)
        else:
            actor = self._dream or self._guided or self.policy
            actions = actor.sample(obs, generator=self._generator, mode="eval").actions
        chunk = actions[0].float().cpu().numpy().astype(np.float32)
        why = first_reason(self.monitors)(observation, chunk)
        return {"actions": chunk, "ask": why} if why else {"actions": chunk}

    def _continued(self, obs: Obs, request: dict[str, Any]) -> torch.Tensor:
        """A chunk (1, H, A) that continues the previous one, by real-time chunking."""
        if self._guided is not None:
            raise UserError(
                "A guided policy cannot continue its previous chunk (real-time chunking). Execute "
                "with --mode sync, naive or ensemble, or serve it without --base."
            )
        previous = torch.tensor(request["previous"])[None].to(self.device)
        horizon, delay, execute = previous.shape[1], request["delay"], request["execute"]
        count = self._proposals()
        # The first action of its own is held, too: there the arm goes over to the new chunk.
        held = min(delay + 1, horizon - execute)
        weights = rtc_weights(horizon, held, execute).to(self.device)
        # A policy that was trained to continue a prefix needs no guidance.
        if 0 < delay <= getattr(self.policy.config, "max_prefix", 0):
            chunks = sample_after(self.policy, obs, previous, delay, self._generator, count)
        else:
            chunks = sample_guided(self.policy, obs, previous, weights, self._generator, count)
        if self._dream is not None:
            return self._dream.choose(obs, chunks)
        if getattr(self.policy, "chooses", False):
            # As it is: an edit would change what must be continued.
            features = self.policy.chooser.encoder(obs)
            return self.policy.chooser.choose(features, chunks)
        return nearest(chunks, previous, weights)

    def _proposals(self) -> int:
        """N, from which a dream, the policy's own critics or the previous plan choose."""
        if self._dream is not None:
            return self._dream.proposals
        return (
            self.policy.config.proposals if getattr(self.policy, "chooses", False) else CANDIDATES
        )
