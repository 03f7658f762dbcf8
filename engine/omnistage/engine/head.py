"""The old place of TokenHead, for one more version: import it from `omnistage.models.kit`."""

from omnistage.engine.adapter import TokenHead as TokenHead
