"""PA-RL before the first env step: critics and policy learn from recorded episodes, failed ones too.

    data set    chunks as they were played, how each episode ended, and its discounted return
    critics     Q(s, a) -> the return of the episode from the chunk on
    actor       imitation of the best of its own N proposals, and of the episodes that were solved

So it is one step of policy improvement: critics of who played, and a policy that is greedy by them
(arXiv:2106.08909). TD targets would ask the critics about what nobody played, and then believe it.
The policy chooses among what it proposes itself, near the data (IDQL, arXiv:2304.10573, chooses
so). PA-RL goes on from the checkpoint, whose critics are ready (arXiv:2412.06685).

Whether critics of so many episodes may choose at all, and whether the step helped, is asked of
episodes that were held out (``algorithms.gate``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from embodyrl.algorithms.edit_actor import EditConfig
from embodyrl.algorithms.gate import Gate, GateConfig
from embodyrl.algorithms.optim import Means
from embodyrl.algorithms.pa_rl import PARL
from embodyrl.data.demonstrations import require_whole
from embodyrl.errors import UserError
from embodyrl.ranges import Count, CountOrZero, Discount, NotNegative, Positive, Range, Share

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations
    from embodyrl.policy import ChoosingPolicy

PICTURES = ("obs/", "next_obs/")
"""Columns that a checkpoint leaves out: they are in the data set."""
JUDGED = 256
"""First observations of so many episodes are judged for the log."""


@dataclass(frozen=True)
class PARLOfflineConfig(GateConfig, EditConfig):
    """Settings of PA-RL on recorded episodes.

    Attributes:
        name: registry name.
        steps_per_iteration: gradient steps of the critics between two rows of the log.
        actor_share: gradient steps of the actor per step of the critics.
        capacity: chunks of the data set at most.
        critic_warmup: gradient steps of the critics before anything is chosen.
        batch_size: chunks per gradient step of the critics.
        actor_batch_size: states per gradient step of the actor, each with N proposals.
        gamma: discount per action.
        lr: of the actor (Adam).
        ema: decay of the averaged weights, by which the policy proposes and which are evaluated and
            saved.
        critic_lr: of the critics (Adam).
        success_coef: so many chunks of solved episodes are imitated per choice.
        hindsight_steps: gradient steps in which the critics learn where things are in pictures.
        shift: pixels, at most, by which pictures are shifted at random before the actor sees them.
        jitter: share by which their brightness, contrast and saturation are changed then, at most;
            hue is changed a little. .2 is usual.
        max_grad_norm: of the actor and of the critics, each; 0 means no bound.
    """

    name: str = "pa_rl_offline"
    steps_per_iteration: Count = 100
    actor_share: Annotated[float, Range(0, 100)] = 0.2
    capacity: Count = 50_000
    critic_warmup: CountOrZero = 1_000
    batch_size: Count = 256
    actor_batch_size: Count = 64
    gamma: Discount = 0.99
    lr: Positive = 2e-4
    ema: Annotated[float, Range(0, 1, open_high=True)] = 0.98
    critic_lr: Positive = 3e-4
    success_coef: NotNegative = 0.5
    hindsight_steps: Count = 450
    shift: CountOrZero = 0
    jitter: Share = 0.0
    max_grad_norm: NotNegative = 10.0


class PARLOffline(PARL):
    """See the module's docstring."""

    Config = PARLOfflineConfig
    Batch = None
    plays = False
    continues_episodes = False
    actor_steps: ClassVar = "actor_share"

    config: Any
    _saved: dict[str, Tensor] | None = None

    def __init__(self, config: Any, policy: ChoosingPolicy) -> None:
        super().__init__(config, policy)
        self.gate = Gate(config, policy, self.buffer)

    @property
    def wants_demos(self) -> bool:
        """It learns from nothing else."""
        return True

    @property
    def verdict(self) -> str:
        """What held-out episodes say of the step so far."""
        return self.gate.words

    def update(
        self, batch: Any, *, progress: float, generator: torch.Generator
    ) -> dict[str, float]:
        """``steps_per_iteration`` gradient steps of the critics, and the actor's share.

        Args:
            batch: ``Demonstrations``, or a ``Mixture`` of them.
            progress: not read.
            generator: of batches and proposals.
        """
        stats = Means()
        if not len(self.buffer):
            self._read(batch)
        if self.gate.open is None and self.gate.check():
            if not self.chooser.ready:
                self.hindsight.begin(generator, stats)
            self.gate.judge(batch, generator)
        # Critics that cannot tell choose nothing, in this run and where the policy acts.
        chooses = self.gate.chooses
        if not chooses:
            self.chooser.ready.fill_(False)
        elif not self.chooser.ready:
            self._warm_up(generator, stats)
        improve = self.actor.step if chooses else self.actor.imitate
        # The actor's steps are spread evenly among those of the critics.
        for _ in range(self.config.steps_per_iteration):
            if chooses:
                self._update_critics(generator, stats)
            self.pending_actor += self.config.actor_share
            while self.pending_actor >= 1:
                self.pending_actor -= 1
                improve(generator, stats)
        return {
            **stats.means(),
            **(self._judge(generator) if chooses else {}),
            **self.gate.figures(generator),
            "gradient_steps": float(self.critic_steps),
            "actor_steps": float(self.actor.steps),
        }

    def _read(self, demos: Demonstrations) -> None:
        """All chunks of the data set into the buffer.

        Raises:
            UserError: they do not fit, are cut, or all episodes ended alike.
        """
        require_whole(demos)
        # The same at each start, so that a run that goes on has the same chunks in the same places.
        generator = torch.Generator().manual_seed(0)
        for chunks in demos.transitions(in_turn=True):
            if len(self.buffer) + len(chunks) > self.config.capacity:
                raise UserError(
                    f"The data set has more than {self.config.capacity} chunks. Raise "
                    "algorithm.capacity, or read fewer episodes (data.episodes)."
                )
            self._store(chunks.to(self.device), generator)
        # Critics learn from the difference.
        solved = self.buffer.data["solved"][: len(self.buffer)]
        if solved.all() or not solved.any():
            kind = "solved" if solved.any() else "failed"
            raise UserError(
                f"All episodes of the data set are {kind} ones, so nothing tells a good chunk from "
                "a bad one. Read failed episodes too (data.keep=all; `embodyrl collect --policy "
                "RUN --keep-failures` records them), or imitate with algorithm.name=sft."
            )
        # A run that goes on has computed more of them.
        if self._saved is not None:
            for name, values in self._saved.items():
                if len(values) != len(self.buffer):
                    raise UserError(
                        f"The data set has {len(self.buffer)} chunks now and had {len(values)} "
                        "when this run began. Give it the same data.path, or start a new run."
                    )
                self.buffer.data[name][: len(values)] = values.to(self.device)
            self._saved = None

    def _update_critics(self, generator: torch.Generator, stats: Means) -> None:
        self._fit_critics(*self._return_batch(generator), generator, stats)

    def _note_choices(self, rows: Tensor, generator: torch.Generator) -> None:
        """Returns need no choice."""

    @torch.no_grad()
    def _judge(self, generator: torch.Generator) -> dict[str, float]:
        """What the critics expect at first observations, and what was earned from there.

        By critics that learned from the same data: they overestimate. The gate does not.
        """
        # First observations of episodes, and what is proposed there.
        data, count = self.buffer.data, len(self.buffer)
        episode = data["episode"][:count]
        first = torch.ones(count, dtype=torch.bool, device=self.device)
        first[1:] = episode[1:] != episode[:-1]
        rows = self.buffer.draw(JUDGED, generator, first.nonzero().flatten())
        proposals = self.policy.propose(
            self.buffer.rows(rows).obs, self.policy.config.proposals, generator
        )
        values = self.chooser.values_of(data["features"][rows], proposals)
        return {
            "return_data": float(data["return"][rows].mean()),
            "value_alone": float(values.mean()),
            "value_chosen": float(values.amax(1).mean()),
        }

    @property
    def _saves_replay(self) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        """As PA-RL's; of the data set only what was computed from it."""
        count = len(self.buffer)
        computed = self._saved or {
            name: values[:count].clone()
            for name, values in self.buffer.data.items()
            if not name.startswith(PICTURES)
        }
        return {**super().state_dict(), "computed": computed, "gate": self.gate.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``; the data set is read again at the next update."""
        super().load_state_dict(state)
        self._saved = dict(state["computed"])
        self.gate.load_state_dict(state["gate"])
