"""The policy of an exported file, as ``PolicyServer`` serves it; without PyTorch."""

from __future__ import annotations

from typing import Any

from embodyrl.errors import UserError
from embodyrl.policies.exported import open_policy_file
from embodyrl.real_robot.policy_link.metadata import FACTS


class FilePolicy:
    """Noise-free action chunks of an exported policy.

    Args:
        path: the ``.onnx`` or ``.npz`` file.
        seed: of the noise that the flow starts from.

    Attributes:
        metadata: as that of ``CheckpointPolicy``.

    Raises:
        UserError: the file cannot be run here.
    """

    def __init__(self, path: str, seed: int = 0) -> None:
        self._file = open_policy_file(path, seed)
        facts = self._file.facts
        # What a robot needs to know, as `policy_facts` says it of a checkpoint.
        self.metadata = {
            "env": facts["name"],
            "cameras": facts["cameras"],
            **{name: facts[name] for name in FACTS},
            "conventions": {name: x for name, x in facts["conventions"].items() if x},
            "horizon": facts["horizon"],
            "execute": facts["horizon"],
        }

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        """The next chunk: ``actions`` (H, A) float32.

        Args:
            observation: as ``server.check_observation`` accepts it.

        Raises:
            UserError: it asks to continue the previous chunk, which takes gradients.
        """
        if "previous" in observation:
            raise UserError(
                "An exported policy cannot continue its previous chunk (real-time chunking). "
                "Execute with --mode sync, naive or ensemble, or serve the checkpoint."
            )
        images = observation.get("images", {})
        chunk = self._file.act(observation["proprio"], images, observation.get("prompt", ""))
        return {"actions": chunk}
