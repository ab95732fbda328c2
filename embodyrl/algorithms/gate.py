"""``Gate``: says from held-out episodes whether critics may change a policy, and whether they helped.

    halves      of the episodes, alike in outcome, data set, task and who acted
    judges      critics of each half, asked about the other, whose returns G they have not seen
    tell        the slope b of G on Q(s, a) where V(s) is held, and the AUROC of V(s) for the outcome
    estimate    value after - before = b E[sum_t gamma^t (Q(s_t, choice) - V(s_t))]

V(s) is the mean of Q over what the policy proposed before the step, some for each of its two places:
an error of V that stands on both sides would look like a slope. The slope says how much of an
advantage that critics promise is really earned: 1 if they are right, 0 if they know their episodes
by heart. So b corrects for the choice of what is overestimated. The estimate is the first order of
the performance difference (Kakade and Langford, ICML 2002): its states are those of the data. The
critics that choose learn from all episodes, as after a cross-validation. RL-100's gate
(arXiv:2510.14830) asks a model of the dynamics instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.algorithms.episode_buffer import EpisodeBuffer
from embodyrl.algorithms.optim import GuardedAdam
from embodyrl.data.mixture import episode_sources
from embodyrl.errors import UserError
from embodyrl.functional.held_out import (
    Interval,
    folds,
    interval,
    outcome_auroc,
    resamples,
    slope,
    slope_sums,
    within,
)
from embodyrl.policies.critics import Critics
from embodyrl.ranges import Choice

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations
    from embodyrl.data.mixture import Mixture

FEWEST = 10
"""Episodes of each outcome, below which nothing is said."""
NETS = 2
"""Judges of each half."""
AT_ONCE = 256
"""Observations at which is proposed, or chunks that are valued, at a time."""
MOST = 10_000
"""Chunks that are judged at most; of more, every so many-th."""
JUDGED = 512
"""Chunks at which it is looked how the policy has changed, at most."""
VERDICTS = {1: "helped", 0: "cannot tell", -1: "did harm"}
KEPT = ("half", "value", "sums", "open", "figures_then", "decision", "words")
"""What a checkpoint holds of a gate, beside its judges."""


@dataclass(frozen=True)
class GateConfig:
    """When critics may change a policy.

    Attributes:
        gate: what happens if critics cannot tell what is earned in episodes that they have not
            seen: ``require`` leaves their choice out, and solved episodes alone are imitated;
            ``warn`` says so and goes on; ``skip`` does not ask.
    """

    gate: Annotated[str, Choice("require", "warn", "skip")] = "warn"


def too_few(solved: int, failed: int) -> str:
    """Why the gate says nothing of so many episodes; empty if it does."""
    if min(solved, failed) >= FEWEST:
        return ""
    return (
        f"there are {solved} solved and {failed} failed episodes, and to tell from episodes that "
        f"were not learned from whether critics help takes {FEWEST} of each"
    )


class Gate:
    """See the module's docstring.

    Args:
        config: of PA-RL offline.
        policy: that is trained.
        buffer: of B chunks, all of the data.

    Attributes:
        open: whether the critics can tell; None before that is known.
        decision: the same in words.
        words: the verdict on the step so far, and the decision.
    """

    def __init__(self, config: Any, policy: Any, buffer: EpisodeBuffer) -> None:
        self.config = config
        self.policy = policy
        self.buffer = buffer
        self.open: bool | None = True if config.gate == "skip" else None
        self.decision = ""
        self.words = ""
        critics = policy.chooser.critics
        size = buffer.horizon * policy.spec.action_dim
        width = policy.config.chooser_width
        self.judges = Critics(policy.chooser.encoder.dim, size, 2 * NETS, width, 2, critics.norm)
        self.judges.to(buffer.device)
        # The half of each chunk's episode; of those judged the value of what was proposed there.
        self.half = torch.zeros(0, dtype=torch.int64)
        self.value = torch.zeros(0)
        self.sums = torch.zeros(0, 2)
        self.figures_then: dict[str, float] = {}

    @property
    def chooses(self) -> bool:
        """Whether the critics' choice is used."""
        return bool(self.open) or self.config.gate != "require"

    # Before the step.

    def check(self) -> bool:
        """Whether there are episodes enough.

        Raises:
            UserError: there are not, and the config requires them.
        """
        _, solved = self._episodes()
        why = too_few(int(solved.sum()), int((~solved).sum()))
        if why and self.config.gate == "require":
            raise UserError(
                f"The gate is closed: {why}. Record more, imitate with algorithm.name=sft, or set "
                "algorithm.gate=warn, which goes on without."
            )
        if why:
            self.open = False
            self.words = self.decision = f"gate: cannot tell: {why}."
            print(self.words, flush=True)
        return not why

    def judge(self, demos: Demonstrations | Mixture, generator: torch.Generator) -> None:
        """Decides whether critics may change the policy, which has not learned yet.

        Args:
            demos: that the buffer was filled from.
            generator: of halves, batches and proposals.
        """
        data, count = self.buffer.data, len(self.buffer)
        # 1. Two halves of the episodes.
        episode, solved = self._episodes()
        about = episode_sources(demos)
        numbers = np.unique(data["episode"][:count].cpu().numpy()).tolist()
        strata = [(bool(s), *about[e]) for s, e in zip(solved, numbers, strict=True)]
        seed = int(torch.randint(2**31, (), generator=generator))
        halves = folds(strata, 2, np.random.default_rng(seed))
        self.half = torch.from_numpy(halves[episode]).to(self.buffer.device)
        # 2. Judges of each.
        errors = self._train(generator)
        # 3. What the judges of the other half say of each chunk.
        rows = self._some(count, MOST)
        proposals = self._propose(rows, generator)
        each = self._values(rows, proposals)
        self.value = each.mean(1)
        of = episode[rows.cpu().numpy()]
        kinds = sorted(set(about.values()))
        kind = np.array([kinds.index(about[e]) for e in numbers])[of]
        # Where a person acted says nothing of what the policy does.
        own = np.array([not kinds[k].person for k in kind])
        one, other = (_array(part.mean(1))[own] for part in each.tensor_split(2, dim=1))
        q = _array(self._values(rows, data["choice"][rows][:, None])[:, 0])[own]
        # Two draws of V: one in the advantage, the other beside the return.
        x, y, z = (
            within(what, other, kind[own])
            for what in (q, _array(data["return"][rows])[own], q - one)
        )
        sums = slope_sums(z, x, y, of[own], len(solved))
        self.sums = torch.from_numpy(sums)
        # 4. Whether it is true.
        draws = resamples(solved, np.random.default_rng(0))
        present, renumbered = np.unique(of, return_inverse=True)
        again = resamples(solved[present], np.random.default_rng(0))
        auroc = outcome_auroc(_array(self.value), renumbered, solved[present], again)
        told = float(slope(sums.sum(0))), interval(slope(sums[draws].sum(1)))
        self.open = told[1][0] > 0
        self.figures_then = {
            "gate_open": float(self.open),
            **_figures("gate_slope", *told),
            **_figures("gate_auroc", *auroc),
            "error_held_out": errors[1],
            "error_trained": errors[0],
        }
        self.decision = self._decide(told, auroc, solved)
        print(self.decision, flush=True)

    def _decide(
        self, told: tuple[float, Interval], auroc: tuple[float, Interval], solved: np.ndarray
    ) -> str:
        measured = (
            f"gate: {_text(*told)} is earned of an advantage that critics promise in episodes that "
            f"they have not seen ({int(solved.sum())} solved, {int((~solved).sum())} failed; AUROC "
            f"of the value for the outcome {_text(*auroc)})."
        )
        if self.open:
            return f"{measured} They may choose."
        if self.chooses:
            return f"{measured} They cannot tell, and choose all the same (gate=warn)."
        c = self.config
        imitates = c.actor_share > 0 and c.success_coef > 0
        instead = "imitates solved episodes alone" if imitates else "stays as it is"
        return (
            f"{measured} They cannot tell, so they choose nothing, and the policy {instead}. More "
            "episodes would help."
        )

    def _train(self, generator: torch.Generator) -> tuple[float, float]:
        """The judges learn the returns of their halves; their errors on these, and on the other."""
        c = self.config
        self.judges.forget(generator)
        optimizer = GuardedAdam(self.judges.parameters(), c.critic_lr, c.max_grad_norm, "judges")
        for _ in range(max(1, c.critic_warmup)):
            rows = self.buffer.draw(c.batch_size, generator)
            square = self._square(rows)
            own = ~self._strange(rows)
            loss = ((square * own).sum(1) / own.sum(1).clamp_min(1)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step(loss)
        with torch.no_grad():
            rows = self._some(len(self.buffer), MOST)
            square, strange = self._square(rows), self._strange(rows)
        return float(square[~strange].mean()), float(square[strange].mean())

    def _square(self, rows: Tensor) -> Tensor:
        """The squared errors (E, B) of all judges for the returns of the chunks at those places."""
        data = self.buffer.data
        q = self.judges(data["features"][rows], data["choice"][rows])
        return (q - data["return"][rows]).square()

    def _strange(self, rows: Tensor) -> Tensor:
        """(E, B), whether a judge has not learned from the chunk at a place."""
        whose = torch.arange(2, device=rows.device).repeat_interleave(NETS)
        return whose[:, None] != self.half[rows]

    # After it.

    def figures(self, generator: torch.Generator) -> dict[str, float]:
        """For the log: what the critics can tell, and what the step so far is estimated to bring."""
        if not self.figures_then:
            return {}
        if not self.chooses:
            self.words = f"{VERDICTS[0]}. {self.decision}"
            return {**self.figures_then, "gate": 0.0}
        gain, bounds = self._gain(generator)
        # Where they cannot tell, neither can this.
        verdict = (bounds[0] > 0) - (bounds[1] < 0) if self.open else 0
        self.words = (
            f"{VERDICTS[verdict]}: estimated change of an episode's return {_text(gain, bounds)}. "
            f"{self.decision}"
        )
        return {**self.figures_then, **_figures("gate_gain", gain, bounds), "gate": float(verdict)}

    def _gain(self, generator: torch.Generator) -> tuple[float, Interval]:
        """The estimated change of the return of an episode by the step, and its interval."""
        data, count = self.buffer.data, len(self.buffer)
        episode, solved = self._episodes()
        # Some chunks stand for all, so many each.
        judged = self._some(count, MOST)
        some = self._some(len(judged), JUDGED)
        rows = judged[some]
        proposals = self._propose(rows, generator)
        chosen = self.policy.chooser.best_of(data["features"][rows], proposals)
        change = self._values(rows, chosen[:, None])[:, 0] - self.value[some]
        # Discounted from the beginning of each episode.
        length = _array(data["valid"][:count].sum(-1))
        begins = np.cumsum(length) - length
        first = np.unique(episode, return_index=True)[1]
        at = rows.cpu().numpy()
        discount = self.config.gamma ** (begins - begins[first][episode])[at]
        promised = count / len(rows) * discount * _array(change)
        of_episode = np.bincount(episode[at], promised, len(solved))
        # What is promised, times what is earned of it.
        draws = resamples(solved, np.random.default_rng(0))
        sums = self.sums.numpy()
        gains = slope(sums[draws].sum(1)) * of_episode[draws].mean(1)
        return float(slope(sums.sum(0)) * of_episode.mean()), interval(gains)

    # Both.

    def _some(self, count: int, most: int) -> Tensor:
        """Numbers of at most so many of ``count`` chunks, evenly apart."""
        return torch.arange(0, count, -(-count // most), device=self.buffer.device)

    def _episodes(self) -> tuple[np.ndarray, np.ndarray]:
        """The number of each chunk's episode (B,), from 0 on, and which are solved (E,)."""
        count = len(self.buffer)
        _, first, episode = np.unique(
            self.buffer.data["episode"][:count].cpu().numpy(),
            return_index=True,
            return_inverse=True,
        )
        return episode, self.buffer.data["solved"][:count].cpu().numpy()[first]

    @torch.no_grad()
    def _values(self, rows: Tensor, proposals: Tensor) -> Tensor:
        """Values (B, N) of proposals (B, N, H, A), by the judges that have not seen the episode."""
        features = self.buffer.data["features"]
        values = []
        for part, own in zip(rows.split(AT_ONCE), proposals.split(AT_ONCE), strict=True):
            n = own.shape[1]
            seen = features[part].repeat_interleave(n, 0)
            q = self.judges(seen, own.flatten(0, 1)).unflatten(1, (-1, n))
            strange = self._strange(part)[..., None]
            values.append((q * strange).sum(0) / NETS)
        return torch.cat(values)

    @torch.no_grad()
    def _propose(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """What the policy proposes at the chunks at those places (B, N, H, A)."""
        count = self.policy.config.proposals
        seen = [self.buffer.rows(part).obs for part in rows.split(AT_ONCE)]
        return torch.cat([self.policy.propose(obs, count, generator) for obs in seen])

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        own = {name: getattr(self, name) for name in KEPT}
        return own | {"judges": self.judges.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.judges.load_state_dict(state["judges"])
        for name in KEPT:
            setattr(self, name, state[name])
        self.half = self.half.to(self.buffer.device)
        self.value = self.value.to(self.buffer.device)


def _array(x: Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy()


def _figures(name: str, value: float, bounds: Interval) -> dict[str, float]:
    return {name: value, f"{name}_low": bounds[0], f"{name}_high": bounds[1]}


def _text(value: float, bounds: Interval) -> str:
    return f"{value:.2f} [{bounds[0]:.2f}, {bounds[1]:.2f}]"
