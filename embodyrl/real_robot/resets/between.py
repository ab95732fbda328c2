"""Between two episodes: which task comes next, and who makes the scene ready for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from embodyrl.real_robot.connect_robot import ConnectedRobot
from embodyrl.real_robot.record.clear_scene import wait_for_rest
from embodyrl.real_robot.resets.judges import Judge
from embodyrl.real_robot.resets.options import ResetOptions
from embodyrl.real_robot.resets.scene_reset import SceneReset


@dataclass
class ResetCounts:
    """What the resets came to.

    Attributes:
        resets: how often the scene had to be made ready.
        ready: of those, how often it was without a person.
        tries: of the script or the policy.
        asked: how often a person was asked.
        seconds: that the resets took, by the arm's clock.
    """

    resets: int = 0
    ready: int = 0
    tries: int = 0
    asked: int = 0
    seconds: float = 0.0


@dataclass
class SceneState:
    """What is known of the scene before an arm, whoever plays on it.

    Attributes:
        back: whether the present episode is of the task that undoes the other.
        asked: whether a person was asked to make the scene ready for it, because the reset failed.
        ended: whether the last episode was solved; None if it came to no end of its own. Whoever
            plays it says so.
        begun: whether the scene was arranged once.
        failures: episodes of the present task in a row that failed.
        counts: of the resets so far.
    """

    back: bool = False
    asked: bool = False
    ended: bool | None = None
    begun: bool = False
    failures: int = 0
    counts: ResetCounts = field(default_factory=ResetCounts)


class Between:
    """Makes the scene ready for the next episode.

    Without a reset the scene is arranged: by the simulator, by a topic, or by a person. With one, it
    is arranged before the first episode, and after that only if the reset fails.

    In practice the policy plays two tasks that undo each other. A solved episode is followed by one
    of the other task, which begins where it ended; a failed one by one of the same task.

    Args:
        connected: the robot.
        reset: brings the scene back, and in practice only the hand; None arranges every time.
        options: how often what may fail.
        ask: says what a person must do, and waits until it is done.
        judge: in practice, of the task that undoes the other; None leaves it to a person's label.

    Attributes:
        state: of the scene.
        judge: the same.
    """

    def __init__(
        self,
        connected: ConnectedRobot,
        reset: SceneReset | None,
        options: ResetOptions,
        ask: Callable[[str], None],
        judge: Judge | None = None,
    ) -> None:
        self._connected = connected
        self._reset = reset
        self._options = options
        self._ask = ask
        self.judge = judge
        self.state = SceneState()

    def prepare(self, init: int, sentence: str, broken: str = "") -> None:
        """Makes the scene ready.

        Args:
            init: number of the initial state, or of the draw.
            sentence: what a person must do, where one is needed.
            broken: why the arm stopped in the last episode, which only a person looks at; else
                empty.
        """
        # Nothing to bring back: no reset, or nobody has arranged the scene yet.
        state = self.state
        state.asked = False
        solved = state.ended
        state.ended = None
        if self._reset is None or not state.begun:
            state.begun = True
            self._arrange(init, sentence)
            return
        # The commands of the episode have come to rest, and the arm follows them a moment later.
        wait_for_rest(self._connected)
        # Bring the scene back, unless only a person can.
        state.failures = 0 if solved else state.failures + (solved is False)
        counts = state.counts
        counts.resets += 1
        why = broken or self._next_task(solved) or self._make_ready(init)
        if not why:
            counts.ready += 1
            return
        # Only a person can. Their scene begins a new count of failures.
        state.asked = True
        counts.asked += 1
        state.failures = 0
        said = f"The scene is not ready: {why.rstrip('.')}."
        print(f"  {said} A person is asked: {counts.asked} of {counts.resets} resets.", flush=True)
        self._arrange(init, f"{said} {sentence}")

    def summary(self) -> dict[str, Any]:
        """The counts as plain data."""
        return asdict(self.state.counts)

    def _next_task(self, solved: bool | None) -> str:
        """Chooses the next task; why a person is needed first, or nothing."""
        # The task that undoes the other fails as often as a reset may be tried.
        options = self._options
        limit = options.tries if self.state.back else options.ask_after
        if limit and self.state.failures >= limit:
            return f"{self.state.failures} episodes in a row failed"
        if options.practice and solved:
            self.state.back = not self.state.back
        return ""

    def _make_ready(self, init: int) -> str:
        """Has the scene brought back; why it is not, or nothing."""
        assert self._reset is not None
        robot: Any = self._connected.robot
        goes_on = hasattr(robot, "go_on")
        # The task that undoes the other begins where the other ended, with the object in the hand.
        if not self.state.back:
            if goes_on and self._reset.way.undoes:
                robot.go_on(init, True)
            counts = self.state.counts
            result = self._reset(counts.resets)
            counts.tries += result.tries
            counts.seconds += result.seconds
            if not result.ready:
                return result.reason
        if goes_on:
            robot.go_on(init, self.state.back)
        # Where a person arranges the scene, ``begin`` only makes the robot ready.
        elif not self.state.back and not self._connected.arranges:
            self._connected.begin(init)
        return ""

    def _arrange(self, init: int, sentence: str) -> None:
        if not self._connected.arranges:
            self._ask(sentence)
        self._connected.begin(init)
        # A simulator of both tasks may have arranged a start of the other one.
        robot: Any = self._connected.robot
        self.state.back = hasattr(robot, "go_on") and robot.at_back
