"""The learner's end of a websocket to an actor on the robot's computer (``remote_actor``).

The actor plays one chunk after the other with the newest weights that it has, so the arm never
waits for a gradient step. The learner learns from what has come. Messages are safetensors
(``distributed.wire``); nothing is unpickled. First the learner sends the run's config. Then the
actor sends, and the learner answers:

    the env's spec, at first                       -> play, evaluate these initial states, or end;
    a chunk and the episodes that ended with it       with weights, if there are newer ones
    an evaluation
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from embodyrl import registry
from embodyrl.algorithm import Algorithm
from embodyrl.config import Config, to_dict
from embodyrl.distributed.wire import from_bytes, to_bytes
from embodyrl.errors import UserError
from embodyrl.real_robot.policy_link.server import admit, refuse_strangers
from embodyrl.rollouts.batches import TransitionBatch
from embodyrl.rollouts.evaluation import Evaluation
from embodyrl.storage import checkpoint
from embodyrl.types import EnvSpec

PORT = 8001
MAX_BYTES = 2**31 - 1
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
        UserError: an algorithm that cannot learn from what it did not just do, or an address that
            may not be used.
    """

    def __init__(
        self, config: Config, host: str = "127.0.0.1", port: int = PORT, token: str = ""
    ) -> None:
        if not registry.load("algorithms", config.algorithm.name).continues_episodes:
            raise UserError(
                f"{config.algorithm.name} learns from its own latest rollouts alone, but an actor "
                "elsewhere plays with weights that are some chunks old. Use sac_flow, rlpd or "
                "wsrl."
            )
        refuse_strangers(host, token)
        self.config = config
        self.restarts = -1
        self._news = threading.Condition()
        self._spec: EnvSpec | None = None
        self._played: list[TransitionBatch] = []
        self._weights: dict[str, Any] = {}
        self._acting: dict[str, Any] = {}
        self._version = 0
        self._job: dict[str, Any] | None = None
        self._evaluation: Evaluation | None = None
        self._busy = self._closed = False
        try:
            self._server = serve(
                self._talk, host, port, process_request=lambda c, r: admit(c, r, token), compression=None,
                max_size=MAX_BYTES,
            )  # fmt: skip
        except OSError as error:
            raise UserError(
                f"The learner cannot listen at {host}:{port} ({error.strerror}). Choose another "
                "--port."
            ) from error
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
    ) -> TransitionBatch:
        """All chunks that came since the last call, at least ``num_chunks`` of them.

        Args:
            algorithm: its weights are what the actor plays with from its next chunk on.
            iteration: not read, nor is ``generator``: what a robot does is not repeated.
            generator: see above.
            device: where the chunks go.
            between: called while waiting; may raise.
        """
        self._publish(algorithm)
        with self._news:
            while len(self._played) < algorithm.config.num_chunks:
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

    def _publish(self, algorithm: Algorithm) -> None:
        weights = {k: v.detach().cpu().clone() for k, v in algorithm.result.state_dict().items()}
        with self._news:
            self._weights = weights
            self._version = self._version + 1
            self._acting = algorithm.acting_state()
            self._news.notify_all()

    def _talk(self, connection: ServerConnection) -> None:
        with self._news:
            if self._busy:
                connection.close(4003, "there is an actor already")
                return
            self._busy = True
        try:
            connection.send(to_bytes(to_dict(self.config)))
            self._greet(from_bytes(self._receive(connection)))
            version = 0
            while True:
                answer, version = self._answer(version)
                connection.send(to_bytes(answer))
                if answer["do"] == "end":
                    return
                self._hear(from_bytes(self._receive(connection)))
        except UserError as error:
            connection.close(4002, str(error)[:100])
        except ConnectionClosed:
            pass
        finally:
            with self._news:
                self._busy = False
                self._news.notify_all()

    @staticmethod
    def _receive(connection: ServerConnection) -> bytes:
        data = connection.recv()
        if isinstance(data, str):
            raise UserError("Messages are binary.")
        return data

    def _greet(self, message: dict[str, Any]) -> None:
        spec = checkpoint.spec_from_json(message["spec"])
        with self._news:
            if self._spec is not None:
                checkpoint.check_compatible(self._spec, spec)
            self._spec = spec
            self.restarts += 1
            self._news.notify_all()

    def _answer(self, version: int) -> tuple[dict[str, Any], int]:
        """What the actor is to do, and the version of the weights that it then has."""
        with self._news:
            most = LEAD * self.config.algorithm.num_chunks
            self._news.wait_for(
                lambda: (
                    self._closed
                    or (self._version and (self._job is not None or len(self._played) < most))
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

    def _hear(self, message: dict[str, Any]) -> None:
        with self._news:
            if "evaluation" in message:
                self._evaluation = Evaluation(message["evaluation"], {}, message["faults"])
            elif len(message["played"].chunks):
                self._played.append(message["played"])
            self._news.notify_all()
