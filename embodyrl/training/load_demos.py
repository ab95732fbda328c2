"""The demonstrations of a run."""

from __future__ import annotations

from typing import Any

from embodyrl.algorithm import Algorithm
from embodyrl.config import Config
from embodyrl.errors import UserError
from embodyrl.types import EnvSpec


def load_demos(config: Config, algorithm: Algorithm, spec: EnvSpec) -> Any:
    """The data sets of the ``data`` section; None where the algorithm reads none.

    Raises:
        UserError: it needs some and ``data.path`` names none, or it names some that nothing would
            read.
    """
    data = config.data
    if not algorithm.wants_demos:
        if data.path:
            raise UserError(
                f"data.path is {data.path!r}, but {config.algorithm.name} with these settings "
                "reads no demonstrations. Leave it out."
            )
        return None
    if not data.path:
        raise UserError(
            "This algorithm learns from demonstrations: give data.path=FOLDER (see `embodyrl "
            "collect --help`)."
        )
    if data.intervention_weight <= 0:
        raise UserError(
            f"data.intervention_weight is {data.intervention_weight}; it must be above 0."
        )
    from embodyrl.data.demonstrations import Demonstrations
    from embodyrl.data.mixture import Mixture

    parts = []
    for path in (data.path, *data.more):
        part = Demonstrations.load(
            path,
            config.policy.horizon,
            spec=spec,
            episodes=data.episodes,
            keep=data.keep,
            cameras=data.cameras or None,
        )
        part.intervention_weight = data.intervention_weight
        parts.append(part)
    weights = list(data.weights)
    if data.codec:
        from embodyrl.world_models.reencode import reencode

        parts = parts + [reencode(part, data.codec) for part in parts]
        weights = weights * 2
    return Mixture(parts, weights or None) if len(parts) > 1 or weights else parts[0]
