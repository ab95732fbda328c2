"""The learner's end of the websockets to the actors on the robots' computers (``remote_actor``).

Each actor plays one chunk after the other on its arm, with the newest weights that it has, so no
arm waits for a gradient step. The learner learns from what has come. Messages are safetensors
(``distributed.wire``); nothing is unpickled. First the learner sends the run's config and the
actor's shard. Then the actor sends, and the learner answers:

    the env's spec, at first                       -> play, evaluate this initial state, or end;
    a chunk and the episodes that ended with it       with weights, if there are newer ones
    an evaluation

An actor is believed nothing that ``check_actor`` has not checked. One that sends something else is
named in the log and disconnected, and so is one that dies. The run keeps what came before, but for
the unfinished episode, and the other arms go on.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State
from websockets.sync.server import ServerConnection

from embodyrl.algorithm import Algorithm
from embodyrl.config import Config, to_dict
from embodyrl.distributed.wire import from_bytes, to_bytes
from embodyrl.errors import UserError
from embodyrl.policy import num_executed
from embodyrl.real_robot.ports import listen, peer
from embodyrl.real_robot.remote.arms import Arms, ConnectedArm, SharedEvaluation
from embodyrl.real_robot.remote.check_actor import (
    Bounds,
    check_configured,
    check_evaluation,
    check_played,
    check_same_env,
    check_spec,
    in_words,
)
from embodyrl.real_robot.remote.check_run import check_run, saved_spec
from embodyrl.rollouts.batches import TransitionBatch
from embodyrl.rollouts.evaluation import Evaluation
from embodyrl.rollouts.start_sampling import Draws
from embodyrl.storage.env_spec import check_compatible
from embodyrl.types import EnvSpec

PORT = 8001
MAX_BYTES = 2**31 - 1
"""Largest message of the learner: it holds the policy's weights."""
MAX_ACTOR_BYTES = 128 * 2**20
"""Largest message of an actor: it holds a chunk and the images before and after it."""
GREETING = 600.0
"""s that an actor may take to build its env. Later it may take any time: a person may be busy."""
GOODBYE = 30.0
"""s that the arms have at the end of a run to finish their chunks and hear that it is over."""
REFUSED = 4002
"""Status by which the learner closes the connection to an actor that it refuses."""
TAKEN = 4003
"""Status by which the learner closes the connection to an actor that there is no place for."""
PROTOCOL_ERRORS = (1002, 1003, 1007, 1009)
"""Statuses by which a connection ends whose other end broke the protocol; 1009 is "too large"."""
log = logging.getLogger(__name__)
LEAD = 4
"""Iterations' worth of chunks that the arms may be ahead of the learner; then they are held."""


class RemoteActors:
    """Collects a run's episodes from actors elsewhere, as ``rollouts`` of ``runner.train``.

    Any number of arms may come and go while the run lasts; it begins with the first.

    Args:
        config: of the run; each actor may override its env.
        host: address to listen at.
        port: 0 takes a free one.
        token: what the actors must know; needed wherever others can reach the address.

    Raises:
        UserError: an algorithm that cannot learn from what it did not just do, an env that is no
            robot, or an address that may not be used.
    """

    def __init__(
        self, config: Config, host: str = "127.0.0.1", port: int = PORT, token: str = ""
    ) -> None:
        algorithm = check_run(config)
        self._env: Any = config.env
        self._limits = self._env.max_reward, algorithm.max_choice
        self._executed = 0  # H, once there is a policy to play with
        self.config = config
        self._news = threading.Condition()
        self._spec: EnvSpec | None = None
        # A run that resumes, or starts from a checkpoint, knows its env already.
        self._known = saved_spec(config)
        self._arms = Arms()
        self._figures: dict[str, float] = {}
        self._weights: dict[str, Any] = {}
        self._acting: dict[str, Any] = {}
        self._version = 0
        self._evaluation: SharedEvaluation | None = None
        self._closed = False
        self._server = listen(
            self._talk,
            host,
            port,
            what="The learner",
            token=token,
            max_bytes=MAX_ACTOR_BYTES,
            max_queue=1,
        )
        self.port = int(self._server.socket.getsockname()[1])
        threading.Thread(target=self._server.serve_forever, name="learner", daemon=True).start()

    @property
    def spec(self) -> EnvSpec:
        """Of each arm; waits until there is one."""
        with self._news:
            if self._spec is None:
                print(
                    f"Waiting for the robot: embodyrl act ws://THIS_MACHINE:{self.port}", flush=True
                )
            while self._spec is None:
                self._news.wait(0.2)  # so that Ctrl-C is heard
            return self._spec

    @property
    def restarts(self) -> int:
        """How often an arm came back."""
        return self._arms.returns

    def figures(self) -> dict[str, float]:
        """Metrics of each arm, of the last collection; see ``Arms.take``."""
        return self._figures

    def collect(
        self,
        algorithm: Algorithm,
        iteration: int,
        *,
        generator: torch.Generator,
        device: torch.device,
        between: Callable[[], None],
        draws: Draws | None = None,
    ) -> TransitionBatch:
        """All chunks that came since the last call, at least ``num_chunks`` of all arms together.

        Args:
            algorithm: its weights are what the arms play with from their next chunk on.
            iteration: its number.
            generator: not read: what a robot does is not repeated.
            device: where the chunks go.
            between: called while waiting; may raise.
            draws: None, because the constructor refuses a run that has some.
        """
        self._publish(algorithm)
        with self._news:
            self._arms.iteration = iteration
            while self._arms.waiting_chunks < algorithm.config.num_chunks:
                self._news.wait(0.1)
                between()
            batch, self._figures = self._arms.take()
            self._news.notify_all()
        return batch.to(device)

    def restart_episodes(self) -> None:
        """See ``Rollouts``; a robot's episodes go on."""

    def evaluate(
        self, algorithm: Algorithm, inits: list[int], seed: int, between: Callable[[], None]
    ) -> Evaluation:
        """See ``training.evaluate.evaluate``; the arms share the initial states."""
        self._publish(algorithm)
        shared = SharedEvaluation(inits, seed)
        # Arms that are free go on with training episodes meanwhile.
        with self._news:
            self._evaluation = shared
            self._news.notify_all()
            while (result := shared.result) is None:
                self._news.wait(0.1)
                between()
            self._evaluation = None
        return result

    def close(self) -> None:
        """Tells the actors that the run is over."""
        with self._news:
            self._closed = True
            self._news.notify_all()
            self._news.wait_for(lambda: not self._arms.connected, timeout=GOODBYE)
        self._server.shutdown()

    def _publish(self, algorithm: Algorithm) -> None:
        weights = {k: v.detach().cpu().clone() for k, v in algorithm.result.state_dict().items()}
        with self._news:
            self._executed = num_executed(algorithm.policy.config)
            self._weights = weights
            self._version = self._version + 1
            self._acting = algorithm.acting_state()
            self._news.notify_all()

    def _talk(self, connection: ServerConnection) -> None:
        name = connection.request.path.strip("/") if connection.request is not None else ""
        try:
            with self._news:
                arm = self._arms.join(name, peer(connection))
        except UserError as error:
            connection.close(TAKEN, in_words(error)[:120])
            return
        wrong = ""
        try:
            self._lead(connection, arm)
        except TimeoutError:
            wrong = f"it said nothing for {GREETING:g} s"
        except UserError as error:
            wrong = in_words(error)
        except ConnectionClosed as error:
            if error.sent is not None and error.sent.code in PROTOCOL_ERRORS:
                wrong = f"it broke the protocol of websockets ({in_words(error)})"
        finally:
            with self._news:
                dropped = self._arms.leave(arm)
                over = self._closed
                others = self._arms.playing
                self._news.notify_all()
        # At the end of the run every actor leaves, which is no news.
        if wrong or not over:
            log.warning(
                "The %s %s in its episode %d%s. Chunks of its unfinished episode that were dropped: "
                "%d. %s",
                arm,
                "was refused" if wrong else "is gone",
                max(arm.begun, 1),
                f": {wrong}" if wrong else "",
                dropped,
                f"The other arms go on: {others}." if others else "The run waits for an arm.",
            )
        if wrong:
            connection.close(REFUSED, wrong[:120])

    def _lead(self, connection: ServerConnection, arm: ConnectedArm) -> None:
        """Tells one actor what to do, and takes what it sends, until the run is over.

        Raises:
            UserError: it sent what it may not send.
            TimeoutError: it sent no spec.
        """
        # 1. Greet: the run's config, and the actor's env.
        connection.send(to_bytes({"config": to_dict(self.config), "shard": arm.shard}))
        bounds = self._greet(from_bytes(self._receive(connection, GREETING)))
        with self._news:
            self._arms.ready(arm)
        # 2. One job after the other, until the run is over.
        version = 0
        while True:
            with self._news:
                answer, evaluation = self._answer(connection, arm, version)
                version = self._version
            if answer["do"] == "end":
                connection.send(to_bytes(answer))
                return
            try:
                connection.send(to_bytes(answer))
                message = from_bytes(self._receive(connection))
                bounds = dataclasses.replace(bounds, horizon=self._executed)
                if evaluation is None:
                    self._hear_played(arm, check_played(message, bounds))
                    continue
                part = check_evaluation(message, bounds, answer["inits"])
            except BaseException:
                # What this arm leaves undone is another one's.
                if evaluation is not None:
                    with self._news:
                        evaluation.give_back(answer["inits"][0])
                        self._news.notify_all()
                raise
            with self._news:
                evaluation.note(arm, part)
                self._news.notify_all()

    @staticmethod
    def _receive(connection: ServerConnection, seconds: float | None = None) -> bytes:
        data = connection.recv(timeout=seconds)
        if isinstance(data, str):
            raise UserError("Messages are binary.")
        return data

    def _greet(self, message: Any) -> Bounds:
        """Takes the spec of an actor's env, and returns what its messages must keep to."""
        spec = check_spec(message)
        with self._news:
            if self._spec is not None:
                check_same_env(self._spec, spec)
            else:
                check_configured(self._env, spec)
                if self._known is not None:
                    check_compatible(self._known, spec)
            self._spec = self._spec or spec
            self._news.notify_all()
        return Bounds(spec, self._executed, *self._limits)

    def _answer(
        self, connection: ServerConnection, arm: ConnectedArm, version: int
    ) -> tuple[dict[str, Any], SharedEvaluation | None]:
        """What an actor is to do, once there is something; and the evaluation that it is part of.

        Args:
            connection: to the actor; where it is lost, waiting ends.
            arm: the actor's.
            version: of the weights that it has.
        """
        most = LEAD * self.config.algorithm.num_chunks

        def due() -> bool:
            if self._closed or connection.state is not State.OPEN:
                return True
            evaluates = self._evaluation is not None and self._evaluation.waits
            return bool(self._version) and (evaluates or self._arms.waiting_chunks < most)

        # Looked at once a second: nothing tells of a connection that is lost.
        while not self._news.wait_for(due, timeout=1.0):
            pass
        if self._closed:
            return {"do": "end"}, None
        answer: dict[str, Any] = {"do": "play", "acting": self._acting}
        if version != self._version:
            answer["weights"] = self._weights
        shared = self._evaluation
        if shared is None or not shared.waits:
            return answer, None
        self._arms.cut(arm)
        return answer | {"do": "evaluate", "inits": [shared.take()], "seed": shared.seed}, shared

    def _hear_played(self, arm: ConnectedArm, played: TransitionBatch) -> None:
        with self._news:
            self._arms.hear(arm, played)
            self._news.notify_all()
