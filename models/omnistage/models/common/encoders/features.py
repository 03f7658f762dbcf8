"""What was computed of media, kept as long as there is room: the next question about the same picture need not look at it again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from omnistage.models.qwen2_5_omni.prompt import Extent


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """A medium as the Thinker takes it. rows: [rows, hidden size], those of pictures before those of sound. digest: of everything that
    they were made from."""

    extent: Extent
    rows: torch.Tensor
    digest: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return self.rows.nbytes


class FeatureCache:
    """The features that were asked for last, by digest, in at most so many bytes. 0: none are kept."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._bytes = most_bytes, 0
        self._kept: OrderedDict[bytes, Features] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def found(self, digest: bytes) -> Features | None:
        features = self._kept.get(digest)
        if features is not None:
            self._kept.move_to_end(digest)
        return features

    def keep(self, features: Features) -> None:
        if features.size > self._most:
            return
        self._bytes += features.size
        if (old := self._kept.pop(features.digest, None)) is not None:
            self._bytes -= old.size
        self._kept[features.digest] = features
        while self._bytes > self._most:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.size
