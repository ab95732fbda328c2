"""``ExportedActor``: an exported file acts where a policy would, so that it can be scored."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch

from embodyrl.errors import UserError
from embodyrl.functional.flow import Generators, randn
from embodyrl.policies.exported import open_policy_file
from embodyrl.policy import Mode
from embodyrl.storage.env_spec import check_compatible
from embodyrl.types import ActionSample, EnvSpec, Obs


class ExportedActor:
    """Acts by an exported policy, with the noise that the checkpoint would have drawn.

    So the file and its checkpoint take the same actions, to rounding, with the same seed.

    Args:
        path: the file.
        spec: of the env.

    Attributes:
        run: name of the run that it was exported from.

    Raises:
        UserError: it cannot be run here, or was made for another env.
    """

    def __init__(self, path: str, spec: EnvSpec) -> None:
        self._file = open_policy_file(path)
        facts = self._file.facts
        # The file says for which env its policy was made.
        names = [f.name for f in fields(EnvSpec)]
        check_compatible({name: facts[name] for name in names if name in facts}, spec)
        self.spec = spec
        self.run: str = facts["run"]
        self.config = SimpleNamespace(
            name=facts["config"]["name"],
            horizon=facts["config"]["horizon"],
            execute=facts["horizon"],
            proposals=facts["noise"][0],
        )

    def sample(self, obs: Obs, *, generator: Generators, mode: Mode) -> ActionSample:
        """See ``Actor.sample``; only in ``"eval"`` mode.

        Raises:
            UserError: another mode, because the file holds the noise-free policy alone.
        """
        if mode != "eval":
            raise UserError("An exported policy is noise-free: it can be evaluated, not trained.")
        # The checkpoint draws its noise proposal by proposal, for all rows at a time.
        count, *shape = self._file.facts["noise"]
        noise = torch.stack([randn((len(obs), *shape), generator) for _ in range(count)], dim=1)
        rows = [self._row(obs, noise, i) for i in range(len(obs))]
        return ActionSample(torch.stack(rows).to(obs.proprio.device))

    def _row(self, obs: Obs, noise: torch.Tensor, i: int) -> torch.Tensor:
        images: dict[str, Any] = {name: x[i].cpu().numpy() for name, x in obs.images.items()}
        chunk = self._file.act(
            obs.proprio[i].cpu().numpy(), images, obs.instruction[i], noise[i].cpu().numpy()
        )
        return torch.from_numpy(chunk)
