"""What comes of a drawing: pictures, a film or sound. A product owns what it cannot be, its ports and the way from latents to
pieces."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Protocol, TypeVar

from omnistage.models.interface import Drawn, DrawRequest, PortSpec, Wanted

Plan = TypeVar("Plan", contravariant=True)
Latents = TypeVar("Latents", contravariant=True)


class Product(Protocol[Plan, Latents]):
    """Of one model. A plan is what the model made of a request; latents are what all steps made of a plan."""

    @property
    def ports(self) -> tuple[PortSpec, ...]:
        """That it comes on."""

    def check(self, request: DrawRequest) -> None:
        """Raises BadRequest for what it cannot be, before anything of it runs."""

    def items(self, plan: Plan) -> Mapping[str, int]:
        """How many come on each port, of the whole plan."""

    def decode(self, plan: Plan, latents: Latents, wanted: Wanted) -> Generator[Drawn, None, None]:
        """Its pieces from the wanted items on, each small enough to be made in one step."""
