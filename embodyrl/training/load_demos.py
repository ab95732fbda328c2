"""The demonstrations of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from embodyrl.algorithm import Algorithm
from embodyrl.config import Config
from embodyrl.errors import UserError, refuse_unread
from embodyrl.types import EnvSpec


def load_demos(
    config: Config, algorithm: Algorithm, spec: EnvSpec, *, pictures: bool = True
) -> Any:
    """The data sets of the ``data`` section; None where the algorithm reads none.

    Args:
        config: of the run.
        algorithm: that learns from them.
        spec: of the env that they must fit.
        pictures: False leaves the pictures undecoded, to see whether the data fit.

    Raises:
        UserError: it needs some and ``data.path`` names none, or it names some that nothing would
            read.
    """
    data = config.data
    if not algorithm.wants_demos:
        keys = [field.name for field in dataclasses.fields(data)]
        why = f"{config.algorithm.name} with these settings reads no demonstrations"
        refuse_unread(data, "data", keys, why)
        return None
    if not data.path:
        raise UserError(
            "This algorithm learns from demonstrations: give data.path=FOLDER (see `embodyrl "
            "collect --help`)."
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
            pictures=pictures,
        )
        part.intervention_weight = data.intervention_weight
        parts.append(part)
    weights = list(data.weights)
    if data.codec and not pictures:
        from embodyrl.world_models.model_files import read_model_meta

        read_model_meta(Path(data.codec))
        weights = []  # one for each data set and its reconstruction
    elif data.codec:
        from embodyrl.world_models.reencode import reencode

        parts = parts + [reencode(part, data.codec) for part in parts]
        weights = weights * 2
    return Mixture(parts, weights or None) if len(parts) > 1 or weights else parts[0]
