"""``WorldModelEnv``: imagined episodes behind the env API, in one batch on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import check_actions, plan_reset
from embodyrl.errors import UserError
from embodyrl.types import Obs, Step
from embodyrl.word_embeddings import embed_sentences
from embodyrl.world_models.config import WorldModelConfig, model_folder
from embodyrl.world_models.dream import Dream, disagreement, plausible
from embodyrl.world_models.film import Film
from embodyrl.world_models.keyframes import select_keyframes
from embodyrl.world_models.members import Members
from embodyrl.world_models.model import NO_INVERSE, WorldModel
from embodyrl.world_models.precision import use_bf16
from embodyrl.world_models.reflectors.base import Reflector, successes
from embodyrl.world_models.reflectors.folder import load_reflector
from embodyrl.world_models.step_record import DreamOutcome, StepRecord


class WorldModelEnv:
    """N dreams of one world model; see ``VecEnv``.

    A dream starts from a real keyframe. It ends in one of four ways:

    - success: the model's success head or the reflector says that the task is solved.
    - doubt (``log["doubt"]``): the model cannot be trusted there, because the training data say
      nothing about it. The dream has failed, so that a policy learns to stay away
      (arXiv:2005.05951); or ``env.doubt`` cuts it, or takes no notice.
    - fault: the latents are not finite or leave the range of the training data, or the reflector
      could not judge the frames. The chunk does not count, as with a broken simulator.
    - truncation: its time is up.
    """

    Config: ClassVar = WorldModelConfig

    def __init__(self, config: WorldModelConfig) -> None:
        """Loads the model.

        Raises:
            UserError: no model in that folder, one without frames, settings that it cannot serve,
                or no keyframe of the split.
        """
        self.config = config
        self.device = config.place()
        self.model = WorldModel.load(model_folder(config), self.device)
        self.model.require_frames()
        _check_abilities(config, self.model)
        keyframes = select_keyframes(self.model, config.split, config.starts)
        self._keys = {name: value.to(self.device) for name, value in keyframes.items()}
        self._words = embed_sentences(self.model.sentences).to(self.device)
        n = config.num_envs
        self.spec = dataclasses.replace(
            self.model.spec,
            name=f"dream of {self.model.spec.name}",
            num_envs=n,
            max_episode_steps=config.max_episode_steps or self.model.spec.max_episode_steps,
            privileged_dim=0 if self.model.finder else self.model.state_dim,
            tasks=("dream",),
            task_steps=(),
            num_init_states=len(self._keys["age"]),
        )
        self._rngs = [np.random.default_rng(config.seed + k) for k in range(n)]
        # The dreams: where they stand, when they end, and the seed of their noise.
        self._dream: Dream | None = None
        self._elapsed = torch.zeros(n, dtype=torch.long, device=self.device)
        self._end = torch.zeros_like(self._elapsed)
        self._running = torch.zeros(n, dtype=torch.bool, device=self.device)
        self._seeds = torch.arange(n)
        self._sentences = [""] * n
        self._images: dict[str, Tensor] = {}
        self._members = Members(config.members, self.model, n)
        # What judges them, the frames that it has seen, and how often in a row it saw success.
        self._reflector: Reflector | None = None
        if config.reflector:
            self._reflector = load_reflector(config.reflector, str(self.device))
        self._film = Film()
        self._streak = torch.zeros(n, dtype=torch.long, device=self.device)
        self._autocast = torch.autocast(
            self.device.type, torch.bfloat16, enabled=use_bf16(config.precision, self.device)
        )

    def close(self) -> None:
        """See ``VecEnv.close``."""

    # ---- Where dreams start. ----

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
        if ids:
            self._start_from_keyframes(ids, inits)
        return self._observe()

    def _start_from_keyframes(self, ids: list[int], inits: list[int]) -> None:
        """Starts the dreams ``ids`` from the keyframes ``inits``."""
        rows = torch.tensor(ids, device=self.device)
        keys = torch.tensor(inits, device=self.device)
        sentences = self._keys["sentence"][keys]
        fresh = self.model.begin(
            self._keys["context"][keys].float(),
            self._keys["proprio"][keys],
            self._words[sentences],
            self._keys["privileged"][keys] if self.model.state is not None else None,
        )
        self._dream = fresh if len(ids) == self.spec.num_envs else self._replaced(rows, fresh)
        for k, sentence in zip(ids, sentences.tolist(), strict=True):
            self._sentences[k] = self.model.sentences[sentence]
        self._seeds[rows.cpu()] = torch.tensor(inits)
        self._members.draw(ids, self._rngs)
        self._start(rows, self._keys["age"][keys])

    @torch.no_grad()
    def dream_from(
        self, obs: Obs, *, first: Obs | None = None, previous: Obs | None = None, age: int = 0
    ) -> Obs:
        """Starts all dreams from what a real env shows, instead of from keyframes.

        Args:
            obs: of N real envs.
            first: what they showed when their episodes began; None means that they begin now.
            previous: a chunk ago; None means the same as ``first``.
            age: actions since their episodes began.

        Raises:
            UserError: the cameras or the picture size differ from those of training, or the
                simulator's state is missing where the model predicts it.
        """
        moments = [first or obs, previous or first or obs, obs]
        for moment in moments:
            self._check_observation(moment)
        # Encode the frames into the latents of the context.
        frames = [
            torch.stack([moment.images[name] for name in self.spec.cameras], dim=1)
            for moment in moments
        ]
        latents = [self.model.codec.encode(frame.to(self.device)).float() for frame in frames]
        # Begin the dreams there.
        obs = obs.to(self.device)
        self._dream = self.model.begin(
            torch.stack(latents, dim=1),
            obs.proprio,
            embed_sentences(obs.instruction).to(self.device),
            self.model.state_of(obs),
        )
        self._sentences = list(obs.instruction)
        self._members.draw(range(self.spec.num_envs), self._rngs)
        every = torch.arange(self.spec.num_envs, device=self.device)
        self._start(every, torch.full_like(self._elapsed, age))
        return self._observe()

    def _check_observation(self, obs: Obs) -> None:
        wanted = {name: tuple(size) for name, size in self.spec.cameras.items()}
        found = {name: tuple(image.shape[1:3]) for name, image in obs.images.items()}
        if found != wanted or len(obs) != self.spec.num_envs:
            raise UserError(
                f"{self.spec.name} continues from {self.spec.num_envs} observations with the "
                f"cameras {wanted}, not from {len(obs)} with {found}."
            )

    def _start(self, rows: Tensor, age: Tensor) -> None:
        """Starts the clocks of the dreams in ``rows``, ``age`` actions into their episodes."""
        limit = self.spec.max_episode_steps
        if self.config.length:
            self._end[rows] = (age + self.config.length).clamp(max=limit)
        else:
            self._end[rows] = limit
        self._elapsed[rows] = age
        self._streak[rows] = 0
        self._running[rows] = True
        self._draw(rows)
        if self._reflector is not None:
            self._film.begin(self._images, rows, self._reflector.cameras, self._reflector.window)

    # ---- One step. ----

    @torch.no_grad()
    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``; a chunk longer than the model's is imagined piece by piece."""
        if self._dream is None:
            raise RuntimeError("step was called before the first reset.")
        actions = check_actions(actions.to(self.device), self.spec, self._running)
        cut_doubt = self.config.doubt == "cut"
        record = StepRecord(*actions.shape[:2], self.device, cut_doubt=cut_doubt)
        before = self._dream
        started = self._running.nonzero().flatten()
        for first in range(0, actions.shape[1], self.model.horizon):
            if not self._running.any():
                break
            # Execute as many actions of this piece as each dream has time for.
            piece = actions[:, first : first + self.model.horizon]
            left = (self._end - self._elapsed).clamp(max=piece.shape[1])
            count = torch.where(self._running, left, 0)
            # Predict the next latent and state, and whether the prediction can be trusted.
            doubtful = self._imagine(piece, count)
            # Ask the success head or the reflector whether the task is solved.
            hit, probability = self._judge()
            # Note how each dream has ended, if it has.
            self._elapsed += count
            outcome = self._outcome(hit, doubtful, probability)
            record.add(first, count, self._running, outcome, probability)
            self._running &= ~outcome.over
        # A dream that broke goes back to where the step began.
        if record.fault.any():
            self._dream = self._dream.where(record.fault, before)
        # Decode the frames, unless the reflector has had them decoded already.
        if self._reflector is None or record.fault.any():
            self._draw(started)
        return record.to_step(self._observe())

    def _outcome(self, hit: Tensor, doubtful: Tensor, probability: Tensor) -> DreamOutcome:
        """How the running dreams have ended; fault goes before doubt, doubt before success."""
        assert self._dream is not None
        fault = self._running & (probability.isnan() | ~plausible(self._dream))
        if self.config.doubt == "ignored":
            doubtful = torch.zeros_like(doubtful)
        doubtful = self._running & doubtful & ~fault
        success = self._running & hit & ~fault & ~doubtful
        time_up = self._running & (self._elapsed >= self._end) & ~fault & ~doubtful & ~success
        return DreamOutcome(success, doubtful, fault, time_up)

    def _imagine(self, actions: Tensor, count: Tensor) -> Tensor:
        """Moves the dreams that run on by a chunk.

        Returns:
            (N,) bool: the prediction cannot be trusted. Either two samples of it differ too much,
            or the state model's networks do, or the pictures do not show the actions.
        """
        assert self._dream is not None
        rows = (count > 0).nonzero().flatten()
        # The model takes whole chunks; what lies beyond ``count`` is not looked at.
        missing = self.model.horizon - actions.shape[1]
        actions = torch.nn.functional.pad(actions, (0, 0, 0, missing))
        chunk = (self._dream[rows], actions[rows], count[rows])
        doubtful = torch.zeros(len(rows), dtype=torch.bool, device=self.device)
        steps = self.config.sampling_steps
        choose = self._members.choice(rows, chunk[0].words, *chunk[1:])
        with self._autocast:
            if steps:
                new, other = (
                    self.model.imagine(*chunk, sample=noise, steps=steps, choose=choose)
                    for noise in self._noise(rows)
                )
                doubtful |= disagreement(new, other) > self.model.max_disagreement
            else:
                new = self.model.imagine(*chunk, choose=choose)
            if self.config.follow:
                error = self.model.action_error(new, actions[rows], count[rows])
                doubtful |= error > self.model.max_action_error
        doubtful |= self.model.ensemble_disagrees(new)
        self._dream = new if len(rows) == len(count) else self._replaced(rows, new)
        return torch.zeros_like(self._running).index_copy(0, rows, doubtful)

    def _noise(self, rows: Tensor) -> Tensor:
        """(2, M, V, c, y, x) that depends on each dream's initial state and age alone."""
        assert self._dream is not None
        shape = self._dream.latent.shape[1:]
        inits = self._seeds[rows.cpu()].tolist()
        ages = self._elapsed[rows].tolist()
        generators = [
            torch.Generator().manual_seed(init * 100_003 + age)
            for init, age in zip(inits, ages, strict=True)
        ]
        samples = [torch.randn(2, *shape, generator=generator) for generator in generators]
        return torch.stack(samples, dim=1).to(self.device)

    def _judge(self) -> tuple[Tensor, Tensor]:
        """Whether each dream that runs is solved; for the others the answer means nothing.

        Returns:
            (N,) bool, and the calibrated probability (N,), NaN where it could not be judged.
        """
        assert self._dream is not None
        probability = torch.zeros(self.spec.num_envs, device=self.device)
        rows = self._running.nonzero().flatten()
        if self._reflector is None:
            calibration = self.model.calibration
            with self._autocast:
                probability[rows] = self.model.success_probability(self._dream[rows])
        else:
            calibration = self._reflector.calibration
            probability[rows] = self._ask_reflector(self._reflector, rows)
        hit, self._streak = successes(probability[:, None], calibration, self._streak)
        return hit[:, 0], calibration.apply(probability).float()

    # ---- Pictures. ----

    def _ask_reflector(self, reflector: Reflector, rows: Tensor) -> Tensor:
        """Its probability (M,) for the newest frames of the dreams in ``rows``."""
        self._draw(rows)
        self._film.append(self._images)
        sentences = [self._sentences[k] for k in rows.tolist()]
        return reflector.judge(self._film.frames(rows), sentences, new=1)[:, -1].to(self.device)

    def _draw(self, rows: Tensor) -> None:
        """Decodes the frames of these dreams; frames handed out before are not changed."""
        assert self._dream is not None
        if len(rows) == 0:
            return
        with self._autocast:
            new = self.model.frames(self._dream[rows])
        if len(rows) < self.spec.num_envs:
            new = {
                name: image.index_copy(0, rows, new[name]) for name, image in self._images.items()
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
            old = getattr(self._dream, field.name)
            if old is not None:
                values[field.name] = old.clone()
                values[field.name][rows] = getattr(new, field.name).to(old.dtype)
        return Dream(**values)


def _check_abilities(config: WorldModelConfig, model: WorldModel) -> None:
    """Refuses settings that this env or its model cannot serve."""
    if config.real_envs:
        raise UserError(
            "A WorldModelEnv has dreams only. make_world_model_env builds real envs beside them."
        )
    if config.sampling_steps and not model.stochastic:
        raise UserError(
            f"{config.model} is deterministic, so there is nothing to sample: leave "
            "env.sampling_steps 0, or train it with stochastic=true."
        )
    if config.follow and model.inverse is None:
        raise UserError(NO_INVERSE)
    doubts = config.sampling_steps or config.follow or model.max_spread
    if config.doubt != "fails" and not doubts:
        raise UserError(
            f"env.doubt is {config.doubt!r}, but nothing casts doubt on a dream here. Train the "
            "model with state_members=5, or set env.follow=true, or leave env.doubt out."
        )
