"""``DreamOptions``: which world model chooses among a served policy's proposals, and how."""

from __future__ import annotations

from dataclasses import dataclass

from embodyrl.errors import UserError


@dataclass(frozen=True)
class DreamOptions:
    """Options of ``serve`` and ``deploy``; see ``world_models.dream_chooser``.

    Attributes:
        dream: folder of the world model; empty for none.
        proposals: chunks that it ranks.
        margin: by which another one must promise more than the policy's first, in probability.
    """

    dream: str = ""
    proposals: int = 8
    margin: float = 0.0

    def __post_init__(self) -> None:
        for name in ("proposals", "margin"):
            if not self.dream and getattr(self, name) != getattr(DreamOptions, name):
                raise UserError(f"--{name} is read with --dream MODEL alone. Leave it out.")

    @property
    def words(self) -> list[str]:
        """The same as options of a command line; none without a model."""
        if not self.dream:
            return []
        options = {"--dream": self.dream, "--proposals": self.proposals, "--margin": self.margin}
        return [str(word) for option in options.items() for word in option]


NO_DREAM = DreamOptions()
