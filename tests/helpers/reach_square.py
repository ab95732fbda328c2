"""A small env with pictures: a hand that moves as it is told, and a square that it must reach."""

import numpy as np
import torch

from embodyrl.data.demonstrations import Demonstrations
from embodyrl.env import EnvConfig, SteppedVecEnv, Tick
from embodyrl.types import EnvSpec, Obs
from embodyrl.world_models.clips import Clips

SIZE = 32
LIMIT = 8
NEAR = 0.5
SPEED = 0.25
REACHED = 0.3
"""How near a hand of ``reaches`` must come."""
CHUNK = 3


def pictures(square, hand):
    """A white square at one place and a red one, the hand, at another; both in [-1, 1]."""
    images = torch.full((len(square), SIZE, SIZE, 3), 60, dtype=torch.uint8)
    for place, colour in ((hand, (200, 40, 40)), (square, (250, 250, 250))):
        rows = ((place.clamp(-1, 1) + 1) * 12 + 2).long()
        for image, (row, column) in zip(images, rows.tolist(), strict=True):
            image[row : row + 5, column : column + 5] = torch.tensor(colour, dtype=torch.uint8)
    return images


class ReachSquare(SteppedVecEnv):
    """The hand starts in the middle; proprioception is where it is."""

    Config = EnvConfig

    def __init__(self, num_envs=8, cameras=True, near=NEAR):
        views = {"front": (SIZE, SIZE)} if cameras else {}
        spec = EnvSpec("test/reach", num_envs, 2, 2, "delta", 10.0, LIMIT, views)
        super().__init__(spec, EnvConfig(num_envs=num_envs))
        self.near = near
        self.square = torch.zeros(num_envs, 2)
        self.hand = torch.zeros(num_envs, 2)

    def _reset(self, env_ids, inits):
        for k, init in zip(env_ids, inits, strict=True):
            place = np.random.default_rng(int(init)).uniform(-1, 1, 2)
            self.square[k] = torch.tensor(place, dtype=torch.float32)
            self.hand[k] = 0.0

    def _step(self, actions, active):
        moved = (self.hand + SPEED * torch.as_tensor(actions).float()).clamp(-1, 1)
        self.hand = torch.where(torch.as_tensor(active)[:, None], moved, self.hand)
        solved = (self.hand - self.square).norm(dim=-1) < self.near
        return Tick(solved.float(), solved, solved, torch.zeros_like(solved))

    def _observe(self, env_ids):
        images = {"front": pictures(self.square, self.hand)} if self.spec.cameras else {}
        return Obs(images, self.hand.clone(), ["go to it"] * self.spec.num_envs)


def demonstrations(episodes, horizon, *, solved=True, cameras=True):
    """The hand goes straight to the square, in six actions."""
    length = 6
    square = torch.rand(episodes, 2, generator=torch.Generator().manual_seed(3)) * 2 - 1
    share = torch.arange(length)[None, :, None] / length
    hand = (square[:, None] * share).flatten(0, 1)
    actions = (square / length / SPEED)[:, None].expand(-1, length, -1).flatten(0, 1)
    frames = pictures(square.repeat_interleave(length, 0), hand).numpy()
    return Demonstrations(
        horizon,
        {"front": frames} if cameras else {},
        hand,
        actions,
        torch.arange(episodes).repeat_interleave(length),
        torch.zeros(len(hand), dtype=torch.long),
        ["go to it"],
        torch.full((len(hand),), solved),
    )


def reaches(episodes: int, seed: int) -> Clips:
    """The hand goes to the square in half of the episodes, and astray in the others."""
    rng = np.random.default_rng(seed)
    frames, hands, actions, solved = [], [], [], []
    for _ in range(episodes):
        square = rng.uniform(-1, 1, 2)
        goal = square if rng.random() < 0.5 else rng.uniform(-1, 1, 2)
        hand = np.zeros(2)
        for _ in range(LIMIT + 1):
            action = np.clip((goal - hand) / SPEED, -1, 1) + 0.2 * rng.standard_normal(2)
            action = action.clip(-1, 1)
            place = torch.tensor(np.array([square, hand]), dtype=torch.float32)
            frames.append(pictures(place[:1], place[1:]).numpy()[0])
            hands.append(hand)
            actions.append(action)
            solved.append(np.linalg.norm(hand - square) < REACHED)
            hand = (hand + SPEED * action).clip(-1, 1)
    number = torch.arange(len(hands))
    start = number // (LIMIT + 1) * (LIMIT + 1)
    return Clips(
        {"front": np.stack(frames)},
        torch.tensor(np.array(hands), dtype=torch.float32),
        torch.tensor(np.array(actions), dtype=torch.float32),
        torch.tensor(np.array(solved)),
        start,
        start + LIMIT + 1,
        torch.zeros(len(number), dtype=torch.long),
        ["go to it"],
        number // (LIMIT + 1),
        ReachSquare(1).spec,
        {"name": "test"},
        torch.ones(len(number), dtype=torch.long),
    )
