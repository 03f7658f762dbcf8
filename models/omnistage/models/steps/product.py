"""The product of a drawing (pictures, a film or sound): its impossible requests, its ports, and the way from latents to pieces."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Protocol, TypeVar

from omnistage.models.interface import Drawn, DrawRequest, PortSpec, Wanted

Plan = TypeVar("Plan", contravariant=True)
Latents = TypeVar("Latents", contravariant=True)


class Product(Protocol[Plan, Latents]):
    """The product of one model. A plan is what the model made of a request; latents are what all steps made of a plan."""

    @property
    def ports(self) -> tuple[PortSpec, ...]:
        """The ports of the product."""

    def check(self, request: DrawRequest) -> None:
        """Raises BadRequest for a request that the product cannot meet, before any step."""

    def items(self, plan: Plan) -> Mapping[str, int]:
        """How many items of the whole plan come on each port."""

    def decode(self, plan: Plan, latents: Latents, ports: Wanted) -> Generator[Drawn, None, None]:
        """The pieces from the wanted items on, each small enough to be made in one step."""
