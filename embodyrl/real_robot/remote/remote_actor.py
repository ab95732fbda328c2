"""``embodyrl act``: plays on this computer's robot for a learner elsewhere (``learner``)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.sync.client import ClientConnection, connect

from embodyrl import registry
from embodyrl.config import resolve
from embodyrl.devices import use_device
from embodyrl.distributed.wire import from_bytes, to_bytes
from embodyrl.errors import UserError
from embodyrl.real_robot.arm_names import with_name
from embodyrl.real_robot.remote.learner import MAX_BYTES, REFUSED, TAKEN
from embodyrl.rollouts.collect import Player, collect_transitions
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.rollouts.seeding import seeded
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.training.setup import Envs, build_algorithm

GONE = 1  # s until a learner that does not answer is not waited for


def act(
    address: str, token: str = "", overrides: list[str] | None = None, device: str = "auto"
) -> int:
    """Plays until the learner's run is over, and returns how many chunks that were.

    Args:
        address: of the learner, ``ws://host:port``, or ``ws://host:port/name`` with the name of
            this arm; by default it has this computer's.
        token: the learner's.
        overrides: of the env of its run: which robot this is.
        device: of the policy.

    Raises:
        UserError: no such learner, it has an arm of that name already, or an override of something
            else.
    """
    if wrong := [o for o in overrides or [] if not o.startswith("env.")]:
        raise UserError(
            f"{wrong[0]} is the learner's to say; here only env.key=value may be changed."
        )
    address = with_name(address)
    headers = {"Authorization": f"Api-Key {token}"} if token else None
    with ExitStack() as opened:
        try:
            connection = opened.enter_context(
                connect(
                    address,
                    compression=None,
                    max_size=MAX_BYTES,
                    additional_headers=headers,
                    close_timeout=GONE,
                )
            )
            sent = _receive(connection)
        except (OSError, InvalidHandshake, InvalidURI, ConnectionClosed, TimeoutError) as error:
            raise UserError(_no_learner(address, error)) from error
        run, shard = sent.get("config"), sent.get("shard")
        if (
            not isinstance(run, dict)
            or not isinstance(run.get("run"), dict)
            or type(shard) is not int
        ):
            raise UserError(f"What answers at {address} sends no run's config: it is no learner.")
        run["run"] |= {"init_checkpoint": "", "device": device, "workers": 1}
        config = resolve(run, overrides or [])
        cls = registry.load("algorithms", config.algorithm.name)
        config = replace(config, algorithm=cls.worker_config(config.algorithm, 1))
        envs = Envs(config)
        opened.callback(envs.close)
        try:
            connection.send(to_bytes({"spec": spec_to_json(envs.train_spec)}))
            return _serve(connection, config, envs, shard)
        except ConnectionClosed as error:
            if error.rcvd is not None and error.rcvd.code == REFUSED:
                raise UserError(
                    f"The learner at {address} refused what this robot sent: {error.rcvd.reason}. "
                    "The arm is at rest."
                ) from error
            raise UserError(
                f"The learner at {address} is gone ({error}). The arm is at rest; start again."
            ) from error


def _no_learner(address: str, error: Exception) -> str:
    """Why no learner takes this arm."""
    closed = error.rcvd if isinstance(error, ConnectionClosed) else None
    if closed is not None and closed.code == TAKEN:
        return f"The learner at {address} has no place for this arm: {closed.reason}."
    return f"No learner answers at {address} ({error})."


def _serve(connection: ClientConnection, config: Any, envs: Envs, shard: int) -> int:
    target = use_device(config.run.device)
    algorithm: Any = build_algorithm(config, envs, target)  # off-policy: it has ``act``
    # The other arms play other initial states, with other noise.
    player = Player(envs.train, config.run.seed, target, shard)
    played = 0
    has_weights = False
    while True:
        told = _receive(connection)
        if told.get("do") == "end":
            return played
        try:
            if "weights" in told:
                algorithm.result.load_state_dict(told["weights"])
                has_weights = True
            algorithm.load_acting_state(told["acting"])
        except (
            ArithmeticError,
            AttributeError,
            KeyError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise UserError(
                f"What the learner sent does not fit the policy ({type(error).__name__}: "
                f"{str(error)[:200]}). The arm is at rest; use the same version on both computers."
            ) from error
        if not has_weights:
            raise UserError("The learner sent no weights.")
        if told["do"] == "evaluate":
            result = evaluate(
                envs.eval, algorithm.result, told["inits"], seed=told["seed"], device=target
            )
            connection.send(to_bytes({"evaluation": result.episodes, "faults": result.faults}))
            player.restart_episodes()
            continue
        player.begin(played)
        batch = collect_transitions(
            player.ongoing_episodes(),
            algorithm.act,
            1,
            generator=seeded(config.run.seed, played, shard),
        )
        connection.send(to_bytes({"played": batch.to("cpu")}))
        played += 1


def _receive(connection: ClientConnection) -> dict[str, Any]:
    data = connection.recv()
    if isinstance(data, str):
        raise UserError("The learner sent text.")
    message = from_bytes(data)
    if not isinstance(message, dict):
        raise UserError("The learner sent what is no map.")
    return message
