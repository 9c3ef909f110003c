"""The models a gateway serves, by every name clients may use; each sees the gateway as if it were the only one.

What no model can have for itself is shared: connections, admission, breakers, links, records. What depends on the model
is its own: tokenizer, threshold, costs of a token, placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farfill.config.model import ClusterConfig
from farfill.config.models import config_for_model
from farfill.core.errors import InvalidRequestError
from farfill.gateway.errors import OverloadedError
from farfill.gateway.principal import Principal

if TYPE_CHECKING:
    from farfill.gateway.service import GatewayService


@dataclass(slots=True)
class ServedModel:
    """`key` is that of the cluster file; `service` the gateway as this model sees it."""

    key: str
    service: GatewayService
    in_progress: int = 0

    @property
    def name(self) -> str:
        """Its own."""
        return self.service.deps.config.model.name

    @property
    def names(self) -> tuple[str, ...]:
        """Its own, and aliases."""
        model = self.service.deps.config.model
        return (model.name, *model.aliases)

    def slot(self) -> ServedModel:
        """Hold it with `with`. Raises OverloadedError (429) when as many requests for it are in progress as may."""
        limit = self.service.deps.config.model.max_concurrent_requests
        if limit and self.in_progress >= limit:
            raise OverloadedError(
                f"{limit} requests for {self.name} are in progress (max_concurrent_requests of the model)",
                reason="model_busy",
            )
        return self

    def __enter__(self) -> None:
        self.in_progress += 1

    def __exit__(self, *_: object) -> None:
        self.in_progress -= 1


@dataclass(slots=True)
class ServedModels:
    """Filled while the gateway is built; owned by the event loop afterwards."""

    _models: dict[str, ServedModel] = field(default_factory=dict[str, ServedModel])
    _by_name: dict[str, ServedModel] = field(default_factory=dict[str, ServedModel])

    def add(self, key: str, service: GatewayService) -> None:
        """One more."""
        served = self._models[key] = ServedModel(key, service)
        for name in served.names:
            self._by_name[name] = served

    def all(self) -> Sequence[ServedModel]:
        """In the cluster file's order."""
        return tuple(self._models.values())

    def visible(self, principal: Principal) -> list[ServedModel]:
        """Those it may use."""
        return [served for served in self._models.values() if principal.may_use(served.names)]

    def find(self, name: str | None, principal: Principal, *, required: bool = False) -> ServedModel:
        """The model of that name; None, unless `required`: the first one.

        Raises InvalidRequestError, the same whether there is no such model or it is not for them.
        """
        visible = self.visible(principal)
        if name is None and visible and not required:
            return visible[0]
        found = None if name is None else self._by_name.get(name)
        if found is not None and found in visible:
            return found
        known = ", ".join(repr(served.name) for served in visible) or "no model for this key"
        if name is None:
            raise InvalidRequestError(f"model is missing; this server has {known}", param="model")
        raise InvalidRequestError(
            f"model {name!r} does not exist; this server has {known}", param="model", reason="model_not_found"
        )

    def configure(self, config: ClusterConfig) -> None:
        """New settings of placement, links and thresholds from now on."""
        for key, served in self._models.items():
            if key and key not in config.models:  # gone from the file: until the restart it goes on as it was
                continue
            found, service = config_for_model(config, key), served.service
            service.links.configure(found.routing)
            service.threshold.configure(found.routing)
            service.placer.configure(found)
