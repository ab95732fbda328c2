"""``GuidanceOptions``: how far a served policy moves away from the one that its training began with."""

from __future__ import annotations

from dataclasses import dataclass

from embodyrl.errors import UserError


@dataclass(frozen=True)
class GuidanceOptions:
    """Options of ``eval``, ``serve`` and ``deploy``; see ``policies.guidance``.

    Attributes:
        base: checkpoint from which the training began; empty for none.
        guidance: 0 acts as ``base``, 1 as the checkpoint itself, more goes further.
    """

    base: str = ""
    guidance: float = 1.0

    def __post_init__(self) -> None:
        if self.guidance != 1.0 and not self.base:
            raise UserError(
                "--guidance moves away from another policy: name its checkpoint with --base."
            )

    @property
    def words(self) -> list[str]:
        """The same as options of a command line; none without a base."""
        if not self.base:
            return []
        return ["--base", self.base, "--guidance", str(self.guidance)]


NO_GUIDANCE = GuidanceOptions()
