"""``WorldModelEnv``: imagined episodes behind the env API, all in one batch on the model's device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import check_actions, plan_reset
from embodyrl.errors import UserError
from embodyrl.types import Obs, Step
from embodyrl.word_embeddings import embed_sentences
from embodyrl.world_models.config import WorldModelConfig, model_folder
from embodyrl.world_models.dream import Dream, disagreement, plausible
from embodyrl.world_models.model import NO_INVERSE, WorldModel, use_bf16
from embodyrl.world_models.reflectors.base import Reflector, successes


class WorldModelEnv:
    """N dreams of one world model; see ``VecEnv``.

    A dream starts from a real keyframe, ends when the model's success head or the reflector says
    that the task is solved, and is truncated when its time is up. One whose latents are no numbers,
    or leave the range of all that was seen in training, or that the reflector could not judge,
    broke: its chunk does not count, as with a simulator. One that is in doubt (``log["doubt"]``)
    has failed: what the data do not say is not worth going to (arXiv:2005.05951).
    """

    Config: ClassVar = WorldModelConfig

    def __new__(cls, config: WorldModelConfig) -> WorldModelEnv:
        """A mixture where some are to be real."""
        if config.real_envs:
            from embodyrl.world_models.mixed_env import MixedEnv

            return cast(WorldModelEnv, MixedEnv(config))
        return super().__new__(cls)

    def __init__(self, config: WorldModelConfig) -> None:
        """Loads the model.

        Raises:
            UserError: no model in that folder, or no keyframe of the split.
        """
        self.config = config
        self.device = torch.device(config.device)
        self.model = model = WorldModel.load(model_folder(config), self.device)
        if config.sampling_steps and not model.stochastic:
            raise UserError(
                f"{config.model} is deterministic, so there is nothing to sample: leave "
                "env.sampling_steps 0, or train it with stochastic=true."
            )
        if config.follow and model.inverse is None:
            raise UserError(NO_INVERSE)
        wanted = {"train": False, "eval": True}
        if config.split not in wanted:
            raise UserError(f"A world model has the splits train and eval, not {config.split!r}.")
        keys = model.keyframes
        chosen = keys["held_out"] == wanted[config.split]
        chosen = (
            (chosen & (keys["age"] == 0) if config.starts == "first" else chosen)
            .nonzero()
            .flatten()
        )
        if len(chosen) == 0:
            raise UserError(f"{config.model} has no keyframes of the split {config.split}.")
        self._keys = {k: v[chosen].to(self.device) for k, v in keys.items()}
        self._words = embed_sentences(model.sentences).to(self.device)
        n = config.num_envs
        self.spec = dataclasses.replace(
            model.spec,
            name=f"dream of {model.spec.name}",
            num_envs=n,
            max_episode_steps=config.max_episode_steps or model.spec.max_episode_steps,
            privileged_dim=model.state_dim,
            tasks=("dream",),
            num_init_states=len(chosen),
        )
        self._rngs = [np.random.default_rng(config.seed + k) for k in range(n)]
        self._elapsed = torch.zeros(n, dtype=torch.long, device=self.device)
        self._end = torch.zeros_like(self._elapsed)
        self._seeds = torch.arange(n)
        self._running = torch.zeros(n, dtype=torch.bool, device=self.device)
        self._reflector = _reflector(config)
        self._film: dict[str, Tensor] = {}
        self._streak = torch.zeros(n, dtype=torch.long, device=self.device)
        self._sentences = [""] * n
        self._dream: Dream | None = None
        self._images: dict[str, Tensor] = {}
        self._autocast = torch.autocast(
            self.device.type, torch.bfloat16, enabled=use_bf16(config.precision, self.device)
        )

    def close(self) -> None:
        """See ``VecEnv.close``."""

    @torch.no_grad()
    def reset(
        self,
        env_ids: Tensor | Sequence[int] | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        init: Sequence[int] | None = None,
    ) -> Obs:
        """See ``VecEnv.reset``; initial state i is the i-th keyframe of the split."""
        ids, inits = plan_reset(self.spec, self._rngs, env_ids, seed, init)
        rows = torch.tensor(ids, device=self.device)
        keys = torch.tensor(inits, device=self.device)
        if ids:
            sentences = self._keys["sentence"][keys]
            state = self._keys["privileged"][keys] if self.model.state is not None else None
            fresh = self.model.begin(
                self._keys["context"][keys].float(),
                self._keys["proprio"][keys],
                self._words[sentences],
                state,
            )
            self._dream = fresh if len(ids) == self.spec.num_envs else self._replaced(rows, fresh)
            for k, sentence in zip(ids, sentences.tolist(), strict=True):
                self._sentences[k] = self.model.sentences[sentence]
            self._seeds[rows.cpu()] = torch.tensor(inits)
            self._start(rows, self._keys["age"][keys])
        return self._observe()

    @torch.no_grad()
    def dream_from(
        self, obs: Obs, *, first: Obs | None = None, previous: Obs | None = None, age: int = 0
    ) -> Obs:
        """Starts all dreams from what a real env shows, instead of from keyframes.

        Args:
            obs: of N real envs.
            first: what they showed when their episodes began; None means that they begin now.
            previous: a chunk ago; None as before.
            age: actions since their episodes began.

        Raises:
            UserError: other cameras, or pictures of another size, than the model was trained on; or
                no simulator's state, where the model dreams of that too.
        """
        wanted = {name: tuple(size) for name, size in self.spec.cameras.items()}
        seen = [first or obs, previous or first or obs, obs]
        for one in seen:
            found = {name: tuple(image.shape[1:3]) for name, image in one.images.items()}
            if found != wanted or len(one) != self.spec.num_envs:
                raise UserError(
                    f"{self.spec.name} goes on from {self.spec.num_envs} observations with the "
                    f"cameras {wanted}, not from {len(one)} with {found}."
                )
        frames = [
            torch.stack([one.images[name] for name in wanted], dim=1).to(self.device)
            for one in seen
        ]
        context = torch.stack([self.model.codec.encode(frame).float() for frame in frames], dim=1)
        words = embed_sentences(obs.instruction).to(self.device)
        state = None if obs.privileged is None else obs.privileged.to(self.device)
        self._dream = self.model.begin(context, obs.proprio.to(self.device), words, state)
        self._sentences = list(obs.instruction)
        self._start(
            torch.arange(self.spec.num_envs, device=self.device),
            torch.full_like(self._elapsed, age),
        )
        return self._observe()

    def _start(self, rows: Tensor, age: Tensor) -> None:
        """The dreams in ``rows`` have been put where they begin, ``age`` actions after their episodes did."""
        limit = self.spec.max_episode_steps
        self._end[rows] = (
            (age + self.config.length).clamp(max=limit) if self.config.length else limit
        )
        self._elapsed[rows] = age
        self._streak[rows] = 0
        self._running[rows] = True
        self._draw(rows)
        self._begin_film(rows)

    @torch.no_grad()
    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``; a chunk longer than the model's is imagined piece by piece."""
        if self._dream is None:
            raise RuntimeError("step was called before the first reset.")
        actions = check_actions(actions.to(self.device), self.spec, self._running)
        n, horizon = actions.shape[:2]
        reward = torch.zeros(n, horizon, device=self.device)
        valid = torch.zeros(n, horizon, dtype=torch.bool, device=self.device)
        success, truncated, fault, doubt = (torch.zeros_like(self._running) for _ in range(4))
        before = self._dream
        started = self._running.nonzero().flatten()
        judged = torch.zeros(n, device=self.device)
        for first in range(0, horizon, self.model.horizon):
            piece = actions[:, first : first + self.model.horizon]
            left = (self._end - self._elapsed).clamp(max=piece.shape[1])
            count = torch.where(self._running, left, 0)
            if not self._running.any():
                break
            doubted = self._advance(piece, count) & self._running
            solved, prob = self._judge()
            judged = torch.where(self._running, prob, judged)
            broke = self._running & (prob.isnan() | ~plausible(self._dream))
            doubted &= ~broke
            solved &= self._running & ~broke & ~doubted
            steps = torch.arange(piece.shape[1], device=self.device)
            valid[:, first : first + piece.shape[1]] = steps < count[:, None]
            rows = solved.nonzero().flatten()
            reward[rows, first + count[rows] - 1] = 1.0
            self._elapsed += count
            late = self._elapsed >= self._end
            success = success | solved
            doubt = doubt | doubted
            fault = fault | broke
            truncated |= self._running & ~solved & ~doubted & late
            self._running &= ~(solved | doubted | broke | late)
        if fault.any():
            valid[fault] = False
            reward[fault] = 0.0
            truncated |= fault
            self._dream = self._dream.where(fault, before)
        if self._reflector is None or fault.any():  # a reflector has had them drawn
            self._draw(started)
        log = {"doubt": doubt, "steps": valid.sum(1), "judged": judged}
        return Step(self._observe(), reward, success | doubt, truncated, valid, success, fault, log)

    def _advance(self, actions: Tensor, count: Tensor) -> Tensor:
        """Imagines the chunk in the envs that run; (N,) bool: where draws, nets, or pictures and actions differ."""
        assert self._dream is not None
        rows = (count > 0).nonzero().flatten()
        short = self.model.horizon - actions.shape[1]
        actions = torch.nn.functional.pad(actions, (0, 0, 0, short)) if short else actions
        doubted = torch.zeros_like(self._running)
        steps = self.config.sampling_steps
        with self._autocast:
            if steps:
                chunk = (self._dream[rows], actions[rows], count[rows])
                after, other = (
                    self.model.imagine(*chunk, sample=x, steps=steps) for x in self._noise(rows)
                )
                doubted[rows] = disagreement(after, other) > self.model.doubt
            else:
                after = self.model.imagine(self._dream[rows], actions[rows], count[rows])
            if self.config.follow:
                doubted[rows] |= (
                    self.model.strays(after, actions[rows], count[rows]) > self.model.strayed
                )
        doubted[rows] |= self.model.doubted(after)
        self._dream = after if len(rows) == len(count) else self._replaced(rows, after)
        return doubted

    def _noise(self, rows: Tensor) -> Tensor:
        """(2, M, V, c, y, x) that depends on each dream's initial state and age alone."""
        assert self._dream is not None
        shape = self._dream.latent.shape[1:]
        ages = self._elapsed[rows].tolist()
        seeds = [
            s * 100_003 + age for s, age in zip(self._seeds[rows.cpu()].tolist(), ages, strict=True)
        ]
        draws = [torch.randn(2, *shape, generator=torch.Generator().manual_seed(s)) for s in seeds]
        return torch.stack(draws, dim=1).to(self.device)

    def _judge(self) -> tuple[Tensor, Tensor]:
        """(N,) whether it is solved, and the calibrated probability; NaN where it could not be judged.

        For envs that do not run it means nothing.
        """
        assert self._dream is not None
        prob = torch.zeros(self.spec.num_envs, device=self.device)
        rows = self._running.nonzero().flatten()
        if self._reflector is None:
            calibration = self.model.calibration
            with self._autocast:
                prob[rows] = self.model.solved(self._dream[rows])
        else:
            calibration = self._reflector.calibration
            self._draw(rows)
            for name, film in self._film.items():
                longer = torch.cat([film[:, :1], film[:, 2:], self._images[name][:, None]], dim=1)
                self._film[name] = longer[:, -film.shape[1] :]
            sentences = [self._sentences[k] for k in rows.tolist()]
            judged = self._reflector.judge(
                {k: v[rows] for k, v in self._film.items()}, sentences, new=1
            )
            prob[rows] = judged[:, -1].to(self.device)
        hit, self._streak = successes(prob[:, None], calibration, self._streak)
        return hit[:, 0], calibration.apply(prob).float()

    def _begin_film(self, rows: Tensor) -> None:
        """What a reflector has seen of a new episode: its first frame, as often as its window is long."""
        if self._reflector is None:
            return
        for name in self._reflector.cameras:
            first = self._images[name][:, None].repeat(1, self._reflector.window, 1, 1, 1)
            if name in self._film:
                self._film[name][rows] = first[rows]
            else:
                self._film[name] = first

    def _draw(self, rows: Tensor) -> None:
        """Brings the pictures of these dreams up to date; those that were handed out stay as they are."""
        assert self._dream is not None
        if len(rows) == 0:
            return
        with self._autocast:
            new = self.model.frames(self._dream[rows])
        if len(rows) < self.spec.num_envs:
            new = {
                name: picture.index_copy(0, rows, new[name])
                for name, picture in self._images.items()
            }
        self._images = new

    def _observe(self) -> Obs:
        assert self._dream is not None
        proprio = self.model.proprio(self._dream)
        state = self.model.privileged(self._dream)
        return Obs(dict(self._images), proprio, list(self._sentences), state)

    def _replaced(self, rows: Tensor, new: Dream) -> Dream:
        """The dreams with those in ``rows`` replaced."""
        if self._dream is None:
            raise UserError("The first reset of a world model must start all its dreams.")
        values = {}
        for field in dataclasses.fields(Dream):
            if (value := getattr(self._dream, field.name)) is not None:
                values[field.name] = value = value.clone()
                value[rows] = getattr(new, field.name).to(value.dtype)
        return Dream(**values)


def _reflector(config: WorldModelConfig) -> Reflector | None:
    if not config.reflector:
        return None
    from embodyrl.world_models.reflectors.folder import load_reflector

    return load_reflector(config.reflector, config.device)
