"""The learner's end of a websocket to an actor on the robot's computer (``remote_actor``).

The actor plays one chunk after the other with the newest weights that it has, so the arm never
waits for a gradient step. The learner learns from what has come. Messages are safetensors
(``distributed.wire``); nothing is unpickled. First the learner sends the run's config. Then the
actor sends, and the learner answers:

    the env's spec, at first                       -> play, evaluate these initial states, or end;
    a chunk and the episodes that ended with it       with weights, if there are newer ones
    an evaluation

An actor is believed nothing that ``check_actor`` has not checked. One that sends something else is
named in the log and disconnected. The run keeps what came before and waits for the next actor.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection

from embodyrl import registry
from embodyrl.algorithm import Algorithm
from embodyrl.config import Config, to_dict
from embodyrl.distributed.wire import from_bytes, to_bytes
from embodyrl.errors import UserError, refuse_unread
from embodyrl.policy import num_executed
from embodyrl.real_robot.env.config import RobotConfig
from embodyrl.real_robot.ports import listen, peer
from embodyrl.real_robot.remote.check_actor import (
    Bounds,
    check_configured,
    check_evaluation,
    check_played,
    check_same_env,
    check_spec,
    in_words,
)
from embodyrl.rollouts.batches import TransitionBatch
from embodyrl.rollouts.evaluation import Evaluation
from embodyrl.rollouts.start_sampling import Draws
from embodyrl.storage import checkpoint, plain_data
from embodyrl.storage.env_spec import check_compatible, spec_from_json
from embodyrl.types import EnvSpec

PORT = 8001
MAX_BYTES = 2**31 - 1
"""Largest message of the learner: it holds the policy's weights."""
MAX_ACTOR_BYTES = 128 * 2**20
"""Largest message of an actor: it holds a chunk and the images before and after it."""
GREETING = 600.0
"""s that an actor may take to build its env. Later it may take any time: a person may be busy."""
REFUSED = 4002
"""Status by which the learner closes the connection to an actor that it refuses."""
PROTOCOL_ERRORS = (1002, 1003, 1007, 1009)
"""Statuses by which a connection ends whose other end broke the protocol; 1009 is "too large"."""
log = logging.getLogger(__name__)
LEAD = 4
"""Iterations' worth of chunks that the actor may be ahead of the learner; then the arm is held."""


class RemoteActor:
    """Collects a run's episodes from an actor elsewhere, as ``rollouts`` of ``runner.train``.

    Args:
        config: of the run; the actor may override its env.
        host: address to listen at.
        port: 0 takes a free one.
        token: what the actor must know; needed wherever others can reach the address.

    Raises:
        UserError: an algorithm that cannot learn from what it did not just do, an env that is no
            robot, or an address that may not be used.
    """

    def __init__(
        self, config: Config, host: str = "127.0.0.1", port: int = PORT, token: str = ""
    ) -> None:
        algorithm = registry.load("algorithms", config.algorithm.name)
        if not algorithm.continues_episodes:
            raise UserError(
                f"{config.algorithm.name} learns from its own latest rollouts alone, but an actor "
                "elsewhere plays with weights that are some chunks old. Use sac_flow, rlpd or "
                "wsrl."
            )
        if not isinstance(config.env, RobotConfig):
            raise UserError(
                f"embodyrl act plays on a robot, but the run's env is {config.env.name}. Set "
                "env.name=robot."
            )
        why = "the actor at the robot chooses what it plays"
        refuse_unread(config.run, "run", ("task_sampling", "start_sampling", "first_length"), why)
        self._env = config.env
        self._limits = config.env.max_reward, algorithm.max_choice
        self._executed = 0  # H, once there is a policy to play with
        self.config = config
        self.restarts = -1
        self._news = threading.Condition()
        self._spec: EnvSpec | None = None
        # A run that resumes, or starts from a checkpoint, knows its env already.
        self._known = _saved_spec(config)
        self._played: list[TransitionBatch] = []
        self._weights: dict[str, Any] = {}
        self._acting: dict[str, Any] = {}
        self._version = 0
        self._job: dict[str, Any] | None = None
        self._evaluation: Evaluation | None = None
        self._episode = 1  # that the actor plays
        self._busy = self._closed = False
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
        """Of the robot; waits until there is one."""
        with self._news:
            if self._spec is None:
                print(
                    f"Waiting for the robot: embodyrl act ws://THIS_MACHINE:{self.port}", flush=True
                )
            while self._spec is None:
                self._news.wait(0.2)  # so that Ctrl-C is heard
            return self._spec

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
        """All chunks that came since the last call, at least ``num_chunks`` of them.

        Args:
            algorithm: its weights are what the actor plays with from its next chunk on.
            iteration: not read, nor is ``generator``: what a robot does is not repeated.
            generator: see above.
            device: where the chunks go.
            between: called while waiting; may raise.
            draws: None, because the constructor refuses a run that has some.
        """
        self._publish(algorithm)
        with self._news:
            while self._chunks_played() < algorithm.config.num_chunks:
                self._news.wait(0.1)
                between()
            played = self._played
            self._played = []
            self._news.notify_all()
        return TransitionBatch.merge(played).to(device)

    def restart_episodes(self) -> None:
        """See ``Rollouts``; a robot's episodes go on."""

    def evaluate(
        self, algorithm: Algorithm, inits: list[int], seed: int, between: Callable[[], None]
    ) -> Evaluation:
        """See ``training.evaluate.evaluate``; the actor's robot plays."""
        self._publish(algorithm)
        with self._news:
            self._evaluation = None
            self._job = {"inits": inits, "seed": seed}
            self._news.notify_all()
            while self._evaluation is None:
                self._news.wait(0.1)
                between()
            self._job = None
            return self._evaluation

    def close(self) -> None:
        """Tells the actor that the run is over."""
        with self._news:
            self._closed = True
            self._news.notify_all()
            self._news.wait_for(lambda: not self._busy, timeout=5.0)
        self._server.shutdown()

    def _chunks_played(self) -> int:
        return sum(len(batch.chunks) for batch in self._played)

    def _publish(self, algorithm: Algorithm) -> None:
        weights = {k: v.detach().cpu().clone() for k, v in algorithm.result.state_dict().items()}
        with self._news:
            self._executed = num_executed(algorithm.policy.config)
            self._weights = weights
            self._version = self._version + 1
            self._acting = algorithm.acting_state()
            self._news.notify_all()

    def _talk(self, connection: ServerConnection) -> None:
        who = peer(connection)
        with self._news:
            busy = self._busy
            self._busy = True
        if busy:
            connection.close(4003, "there is an actor already")
            return
        self._episode = 1
        wrong = ""
        try:
            self._lead(connection)
        except TimeoutError:
            wrong = f"it said nothing for {GREETING:g} s"
        except UserError as error:
            wrong = in_words(error)
        except ConnectionClosed as error:
            if error.sent is not None and error.sent.code in PROTOCOL_ERRORS:
                wrong = f"it broke the protocol of websockets ({in_words(error)})"
        finally:
            with self._news:
                self._busy = False
                self._news.notify_all()
        if wrong:
            log.warning(
                "The actor at %s was refused in its episode %d: %s. Nothing else is lost; the run "
                "waits for an actor.",
                who,
                self._episode,
                wrong,
            )
            connection.close(REFUSED, wrong[:120])

    def _lead(self, connection: ServerConnection) -> None:
        """Tells one actor what to do, and takes what it sends, until the run is over.

        Raises:
            UserError: it sent what it may not send.
            TimeoutError: it sent no spec.
        """
        connection.send(to_bytes(to_dict(self.config)))
        bounds = self._greet(from_bytes(self._receive(connection, GREETING)))
        version = 0
        while True:
            answer, version = self._answer(version)
            connection.send(to_bytes(answer))
            if answer["do"] == "end":
                return
            bounds = dataclasses.replace(bounds, horizon=self._executed)
            self._hear(from_bytes(self._receive(connection)), answer, bounds)

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
            self.restarts += 1
            self._news.notify_all()
        return Bounds(spec, self._executed, *self._limits)

    def _answer(self, version: int) -> tuple[dict[str, Any], int]:
        """What the actor is to do, and the version of the weights that it then has."""
        with self._news:
            most = LEAD * self.config.algorithm.num_chunks
            self._news.wait_for(
                lambda: (
                    self._closed
                    or (self._version and (self._job is not None or self._chunks_played() < most))
                )
            )
            if self._closed:
                return {"do": "end"}, version
            answer: dict[str, Any] = {"do": "play", "acting": self._acting}
            if self._job is not None and self._evaluation is None:
                answer |= {"do": "evaluate", **self._job}
            if version != self._version:
                answer["weights"] = self._weights
            return answer, self._version

    def _hear(self, message: Any, asked: dict[str, Any], bounds: Bounds) -> None:
        """Takes what an actor sent for what it was asked to do, once it is checked."""
        if asked["do"] == "evaluate":
            evaluation = check_evaluation(message, bounds, asked["inits"])
            with self._news:
                self._evaluation = evaluation
                self._news.notify_all()
            return
        played = check_played(message, bounds)
        ended = played.chunks.terminated | played.chunks.truncated
        self._episode += int(ended.sum())
        with self._news:
            if len(played.chunks) or played.episodes:
                self._played.append(played)
            self._news.notify_all()


def _saved_spec(config: Config) -> EnvSpec | None:
    """The env's spec in the run's newest checkpoint, or in that which it starts from.

    Raises:
        UserError: that checkpoint cannot be read.
    """
    newest = checkpoint.latest(config.run.folder / "checkpoints")
    if newest is None and config.run.init_checkpoint:
        newest = checkpoint.find(config.run.init_checkpoint)
    if newest is None:
        return None
    meta = plain_data.read_json(newest / "meta.json", checkpoint.RUN_META, checkpoint.REMEDY)
    return spec_from_json(meta["spec"])
