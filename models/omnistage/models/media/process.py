"""One decoding process, as its parent sees it."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
from dataclasses import asdict
from typing import Any

import structlog

from omnistage.models.helper_process import HelperProcess
from omnistage.models.media.errors import BadMedia
from omnistage.models.media.limits import MediaLimits
from omnistage.models.reports import bytes_told

log = structlog.get_logger(__name__)

OUT_OF_MEMORY = errno.ENOMEM
"""The exit status of a process whose memory is short; child.py, which loads only modules that decoding needs, has the same."""

TIME_IS_UP = signal.SIGPROF
"""The signal that ends the process when it has used the processor time that its medium may have."""

LIFE = 200
"""The number of media after which a process is replaced: the memory that libraries leak is freed with it."""

UNCONFINED = b"unconfined"
"""The word that the process sends in place of "ready" if the kernel has no filter of calls; child.py has the same."""


class DecodingProcess(HelperProcess):
    """A process that decodes one medium at a time. It starts at once, and `decode` waits until it is ready. Call `end` in every case."""

    def __init__(self, limits: MediaLimits) -> None:
        self._is_seen_ready = False
        self._decoded = 0  # Number of media.
        self._memory_bytes = limits.memory_bytes
        super().__init__("omnistage.models.media.child", [json.dumps(asdict(limits))], "decodes media")

    def is_spent(self) -> bool:
        """Whether another process is to decode the next medium."""
        return self._decoded >= LIFE

    async def decode(self, request: dict[str, Any], file: int, result: int, limit_s: float) -> bytes:
        """Decode one medium. file, result: descriptors to read from and to write into. Returns the answer, as JSON. Raises NotTaken if the
        process ends or is too slow before it takes the medium, else BadMedia; after these or a cancellation, end the process."""
        if await self.wait_ready() == UNCONFINED and not self._is_seen_ready:
            log.warning("media.unconfined", pid=self.pid)
        self._is_seen_ready = True
        await self.send(json.dumps(request | {"limit_s": limit_s}).encode(), file, result)
        try:
            async with asyncio.timeout(limit_s):
                answer = await self.receive()
        except TimeoutError:
            raise BadMedia(f"decoding it takes longer than {limit_s:g} s: send a part of it, or a smaller one") from None
        if not answer:
            await self.kill()
            raise BadMedia(self._fault())
        self._decoded += 1
        return answer

    def _fault(self) -> str:
        """The text of the error for a medium whose process has ended."""
        match self.status():
            case status if status == OUT_OF_MEMORY:
                return f"decoding it takes more memory than the {bytes_told(self._memory_bytes)} there are: send a smaller one"
            case status if status == -TIME_IS_UP:
                return "decoding it takes longer than any of its size should: encode it anew, or send a part of it"
        return f"decoding it ended the process that does it ({self.death()}): it is damaged or too large, encode it anew"
