"""What all endpoints of one server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.serve.desk import Desk
from lfm2np.serve.limits import Limits
from lfm2np.serve.metrics import Metrics
from lfm2np.serve.refusals import Refusal
from lfm2np.serve.replies.shared import fingerprint_of


@dataclass(frozen=True)
class Settings:
    """
    name  under which the model is served
    key   that clients must show; None asks for none
    """

    name: str
    key: str | None = None
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, eq=False)
class Service:
    """
    capacity  tokens that the cache holds
    created   seconds since 1970, when it began
    """

    model: LoadedModel
    settings: Settings
    capacity: int
    desk: Desk
    metrics: Metrics
    created: int

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.model)

    def require_model(self, name: str | None) -> None:
        """Refusal for another model than the one that is served."""
        if name is not None and name != self.settings.name:
            raise Refusal(404, f"model {name[:200]!r}: expected {self.settings.name!r}, the only one here", "model")
