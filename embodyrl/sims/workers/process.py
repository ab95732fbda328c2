"""The child's side of ``pool.PooledVecEnv``: a process that hosts one VecEnv and answers messages.

Messages go over a socket pair. Observations, actions and rewards lie in anonymous shared memory,
whose file descriptor comes over the same socket, so no named memory can be left behind. The process
ends by itself when its parent is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import traceback
import types
import typing
from typing import Any

import numpy as np
import torch

from embodyrl import registry
from embodyrl.errors import UserError
from embodyrl.rollouts.fault_watch import GuardedEnv
from embodyrl.sims.workers.messages import receive_message, send_message
from embodyrl.storage.env_spec import spec_from_json
from embodyrl.types import EnvSpec, Obs, Step

Layout = dict[str, tuple[str, tuple[int, ...]]]


def memory_layout(spec: EnvSpec, horizon: int) -> Layout:
    """Name -> (dtype, shape) of the arrays in shared memory, for all N envs.

    Args:
        spec: of all N envs together.
        horizon: actions of the longest chunk.
    """
    n = spec.num_envs
    images: Layout = {
        f"image/{name}": ("uint8", (n, *size, 3)) for name, size in spec.cameras.items()
    }
    return {
        **images,
        "proprio": ("float32", (n, spec.proprio_dim)),
        "privileged": ("float32", (n, spec.privileged_dim)),
        "actions": ("float32", (n, horizon, spec.action_dim)),
        "reward": ("float32", (n, horizon)),
        "valid": ("bool", (n, horizon)),
        "terminated": ("bool", (n,)),
        "truncated": ("bool", (n,)),
        "success": ("bool", (n,)),
        "success_once": ("bool", (n,)),
        "fault": ("bool", (n,)),
    }


def memory_size(layout: Layout) -> int:
    """Bytes that a layout needs; every array starts on a cache line."""
    return max(64, sum(_aligned(dtype, shape) for dtype, shape in layout.values()))


def map_memory(fd: int, layout: Layout) -> dict[str, np.ndarray]:
    """The arrays of a layout, as views of the shared memory behind ``fd``."""
    memory = mmap.mmap(fd, memory_size(layout))
    arrays = {}
    offset = 0
    for name, (dtype, shape) in layout.items():
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(memory, dtype=dtype, count=count, offset=offset).reshape(shape)
        offset += _aligned(dtype, shape)
    return arrays


def _aligned(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array, rounded up to whole cache lines of 64."""
    return -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 64) * 64


def config_to_json(config: Any) -> dict[str, Any]:
    """A config dataclass, or a spec, as plain data."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def config_from_json(cls: Any, data: dict[str, Any]) -> Any:
    """The config dataclass ``cls`` from plain data (JSON turned its tuples into lists)."""
    hints = typing.get_type_hints(cls)
    return cls(**{key: _restore(hints[key], value) for key, value in data.items()})


def _restore(hint: Any, value: Any) -> Any:
    """A value from JSON as the type ``hint`` says: tuples, nested dataclasses, dicts of them."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if value is None:
        return None
    if origin in (typing.Union, types.UnionType):
        return _restore(next(a for a in args if a is not type(None)), value)
    if dataclasses.is_dataclass(hint):
        return config_from_json(hint, value)
    if origin is tuple or hint is tuple:
        inner = args[0] if args else Any
        return tuple(_restore(inner, item) for item in value)
    if origin is dict and len(args) == 2:
        return {key: _restore(args[1], item) for key, item in value.items()}
    return value


class _EnvHost:
    """Owns the env, and its scripted expert where one was asked for; a method for each command."""

    def __init__(self, name: str, config: dict[str, Any], first: int) -> None:
        self.name = name
        self.config = config
        self.first = first  # number of its first env in the pool
        self.env: Any = None
        self.expert: Any = None
        self.expert_args: dict[str, Any] | None = None
        self.arrays: dict[str, np.ndarray] = {}
        self.build()

    def build(self) -> None:
        """Makes the env, and the expert again if there was one."""
        entry = registry.load("envs", self.name)
        made = entry(config_from_json(entry.Config, self.config))
        # An error passes: it is the parent's business, and this env is then made anew.
        self.env = GuardedEnv(made, catch=False)
        self.rows = slice(self.first, self.first + self.env.spec.num_envs)
        if self.expert_args is not None:
            self.expert = self.env.make_expert(**self.expert_args)

    def hello(self) -> dict[str, Any]:
        return {"spec": config_to_json(self.env.spec)}

    def reset(self, env_ids: list[int], init: list[int]) -> dict[str, Any]:
        obs = self.env.reset(env_ids, init=init)
        self._write_obs(obs)
        return {"instruction": obs.instruction}

    def step(self, horizon: int) -> dict[str, Any]:
        actions = torch.from_numpy(self.arrays["actions"][self.rows, :horizon].copy())
        return self._write_step(self.env.step(actions))

    def make_expert(self, **args: Any) -> dict[str, Any]:
        self.expert_args = args
        self.expert = self.env.make_expert(**args)
        return {}

    def expert_reset(self, env_ids: list[int]) -> dict[str, Any]:
        self.expert.reset(env_ids)
        return {}

    def expert_rollout(self, horizon: int) -> dict[str, Any]:
        step, actions = self.env.rollout(self.expert.act, horizon)
        self.arrays["actions"][self.rows, :horizon] = actions.cpu().numpy()
        return self._write_step(step)

    def _write_obs(self, obs: Obs) -> None:
        for name, image in obs.images.items():
            self.arrays[f"image/{name}"][self.rows] = image.cpu().numpy()
        self.arrays["proprio"][self.rows] = obs.proprio.cpu().numpy()
        if obs.privileged is not None:
            self.arrays["privileged"][self.rows] = obs.privileged.cpu().numpy()

    def _write_step(self, step: Step) -> dict[str, Any]:
        self._write_obs(step.obs)
        horizon = step.reward.shape[1]
        for name in ("reward", "valid"):
            self.arrays[name][self.rows, :horizon] = getattr(step, name).cpu().numpy()
        for name in ("terminated", "truncated", "success", "fault"):
            self.arrays[name][self.rows] = getattr(step, name).cpu().numpy()
        self.arrays["success_once"][self.rows] = step.ever_solved.cpu().numpy()
        log = {k: [str(v.dtype).removeprefix("torch."), v.tolist()] for k, v in step.log.items()}
        return {"instruction": step.obs.instruction, "log": log, "faults": self.env.faults}


def _watch_parent(sock: socket.socket) -> None:
    """Ends the process when its parent is gone, even in the middle of a step."""
    parent = os.getppid()
    poll = select.poll()
    poll.register(sock.fileno(), 0)  # hang-ups are reported without being asked for
    while not poll.poll(1000) and os.getppid() == parent:
        pass
    os._exit(0)


def serve(sock: socket.socket) -> None:
    """Builds the env that the first message names, and answers messages until the socket closes."""
    first, _ = receive_message(sock)
    # The thread ends the process when the parent dies; messages alone would not tell in a step.
    threading.Thread(target=_watch_parent, args=(sock,), daemon=True).start()
    try:
        torch.set_num_threads(first["threads"])
        host = _EnvHost(first["name"], first["config"], first["first"])
    except BaseException as error:
        send_message(sock, {"seq": first["seq"], "error": _describe(error)})
        return
    send_message(sock, {"seq": first["seq"], **host.hello()})
    # One answer to each message, with the message's number; "attach" asks for none.
    while True:
        message, files = receive_message(sock)
        seq = message.pop("seq")
        command = message.pop("command")
        if command == "close":
            host.env.close()
            return
        if command == "attach":
            (fd,) = files
            spec = spec_from_json(message["spec"])
            host.arrays = map_memory(fd, memory_layout(spec, message["horizon"]))
            os.close(fd)
            continue
        try:
            reply = getattr(host, command)(**message)
        except Exception as error:
            send_message(sock, {"seq": seq, "error": _describe(error)})
            # After any other error the env may be in any state, so it is made anew.
            if not isinstance(error, UserError):
                with contextlib.suppress(Exception):
                    host.env.close()
                host.build()
        else:
            send_message(sock, {"seq": seq, **reply})


def _describe(error: BaseException) -> dict[str, str]:
    """An error as the parent gets it: the class's name if it is a ``UserError``, and the text."""
    user = type(error).__name__ if isinstance(error, UserError) else ""
    text = str(error) if user else "".join(traceback.format_exception(error)[-6:])
    return {"user": user, "text": text}


def main(fd: int) -> None:
    """The whole life of the process, with the socket ``fd``; see ``fork_server``."""
    faulthandler.enable()  # a segfault leaves its stack in the log that the parent quotes
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    with (
        socket.socket(fileno=fd) as sock,
        contextlib.suppress(EOFError, BrokenPipeError),
    ):
        serve(sock)
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit handlers of simulators and drivers are known to hang or crash; nothing is left to save.
    os._exit(0)
