"""``check_algorithm``: does an algorithm keep what the runner, workers and checkpoints rely on?"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from embodyrl.algorithm import Algorithm
from embodyrl.checks.error import CheckError, require
from embodyrl.env import VecEnv
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.seeding import seeded
from embodyrl.storage.state_tree import flatten


def check_algorithm(
    make: Callable[[], Algorithm], env: VecEnv, *, demos: Any = None, iterations: int = 3
) -> None:
    """Trains for a few iterations, saves, resumes and compares; returns if all is well.

    Args:
        make: builds the algorithm anew with the same initial weights, policy included.
        env: that it is trained in.
        demos: the demonstrations, where it wants some.
        iterations: how many; each is played and learned from.

    Raises:
        CheckError: says in words which promise is broken.
    """
    algorithm = make()
    _check_class(algorithm)
    before = _weights(algorithm)
    require(
        all(torch.equal(v, before[k]) for k, v in _weights(make()).items()),
        "make() built policies with different weights. Seed the policy inside it: call "
        "torch.manual_seed(0) first, or use embodyrl.build.make_policy(config, spec, seed).",
    )
    require(
        not algorithm.wants_demos or demos is not None,
        "It wants demonstrations (wants_demos), and none were given to the check.",
    )
    first = _train(algorithm, env, demos, range(iterations))
    require(
        any(not torch.equal(v, before[k]) for k, v in _weights(algorithm).items()),
        f"{iterations} iterations changed nothing in ``result``. Give the check more of them if "
        "the algorithm warms up first.",
    )
    _check_repeats(make, env, demos, first, iterations)
    _check_resume(make, algorithm, env, demos, iterations)
    _check_acting_state(make, algorithm)


def _check_class(algorithm: Algorithm) -> None:
    cls = type(algorithm)
    require(isinstance(algorithm, Algorithm), f"{cls.__name__} is no embodyrl.algorithm.Algorithm.")
    for name in ("config", "policy", "result"):
        require(
            hasattr(algorithm, name),
            f"It has no attribute {name}: __init__ must call super().__init__(config, policy).",
        )
    config = algorithm.config
    params = getattr(cls.Config, "__dataclass_params__", None)
    require(params is not None and params.frozen, "Config is no frozen dataclass.")
    require(bool(getattr(config, "name", "")), "Config has no name, the registry's.")
    if cls.plays:
        require(cls.Batch is not None, "Batch is not set: the class of what collect returns.")
        for name in ("to", "merge"):
            require(hasattr(cls.Batch, name), f"Batch has no {name}().")
        require(dataclasses.is_dataclass(cls.Batch), "Batch is no dataclass.")
    for count in (1, 2):
        shared = cls.worker_config(config, count)
        require(isinstance(shared, cls.Config), "worker_config does not return a Config.")


def _train(
    algorithm: Algorithm, env: VecEnv, demos: Any, iterations: range
) -> list[dict[str, float]]:
    """The metrics of each iteration, played and learned as the runner does."""
    player = Player(env)
    if algorithm.plays and algorithm.takes_demos and demos is not None and not iterations.start:
        algorithm.add_demos(demos)
    rows = []
    for i in iterations:
        generator = seeded(0, i)
        batch = demos
        if algorithm.plays:
            batch = player.collect(algorithm, i, generator=generator)
            require(
                isinstance(batch, algorithm.Batch or object),
                f"collect returned a {type(batch).__name__}, not a Batch.",
            )
            for name in ("episodes", "env_steps"):
                require(hasattr(batch, name), f"What collect returned has no {name}.")
            moved = batch.to("cpu")
            merged = type(batch).merge([moved, moved])
            require(
                merged.env_steps == 2 * batch.env_steps,
                "Batch.merge of two batches does not add up env_steps.",
            )
        row = algorithm.update(batch, progress=i / iterations.stop, generator=generator)
        require(
            isinstance(row, dict),
            f"update returned a {type(row).__name__}, not a dict of figures for the log.",
        )
        wrong = [key for key, value in row.items() if not isinstance(value, float | int)]
        require(not wrong, f"update returned {wrong[:1]}, which is no number.")
        rows.append(row)
    return rows


def _weights(algorithm: Algorithm) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in algorithm.result.state_dict().items()}


def _same(a: dict[str, float], b: dict[str, float]) -> bool:
    return a.keys() == b.keys() and all(
        a[k] == b[k] or (math.isnan(a[k]) and math.isnan(b[k])) for k in a
    )


def _check_repeats(
    make: Callable[[], Algorithm],
    env: VecEnv,
    demos: Any,
    first: list[dict[str, float]],
    iterations: int,
) -> None:
    again = _train(make(), env, demos, range(iterations))
    for i, (a, b) in enumerate(zip(first, again, strict=True)):
        require(_same(a, b), f"The same seeds gave other metrics in iteration {i}.")


def _check_resume(
    make: Callable[[], Algorithm], done: Algorithm, env: VecEnv, demos: Any, iterations: int
) -> None:
    """A fresh algorithm with the saved state goes on as the one that was saved."""
    resumed = make()
    if resumed.plays and resumed.takes_demos and demos is not None:
        resumed.add_demos(demos)
    state = copy.deepcopy(done.state_dict())
    try:
        flatten(state, "algorithm")
    except TypeError as error:
        raise CheckError(f"state_dict(): {error}.") from error
    weights = _weights(done)
    resumed.result.load_state_dict(weights)
    resumed.load_state_dict(state)
    further = range(iterations, iterations + 1)
    gone_on = _train(done, env, demos, further)
    again = _train(resumed, env, demos, further)
    weights = _weights(done)
    require(
        _same(gone_on[0], again[0])
        and all(torch.equal(v, weights[k]) for k, v in _weights(resumed).items()),
        "After load_state_dict(state_dict()) the next iteration differs: state_dict() lacks "
        "something that update or collect reads.",
    )


def _check_acting_state(make: Callable[[], Algorithm], done: Algorithm) -> None:
    state = done.acting_state()
    require(
        all(isinstance(v, torch.Tensor) for v in state.values()),
        "acting_state() holds something that is no tensor.",
    )
    make().load_acting_state(state)
