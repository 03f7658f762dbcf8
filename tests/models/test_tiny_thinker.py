"""Rows of a model that computes in bfloat16 are the bits that its decoder gave."""

from __future__ import annotations

import numpy as np
import torch

from helpers.models import said
from helpers.sequences import items, read
from helpers.tiny_thinker import TinyThinker
from omnistage.models.conversation import Turn
from omnistage.models.interface import TensorRows, TextPiece, TextRequest

ASKED = TextRequest((Turn("user", ("What is a bfloat16, and why are its rows half as long?",)),), seed=3, max_tokens=12)


async def test_rows_of_prompt_and_reply_are_the_bits_of_the_taps() -> None:
    model = TinyThinker()
    tokens, rows = list[int](), {"prompt": list[np.ndarray](), "hidden": list[np.ndarray]()}
    async for piece in said(model, ASKED, {"text": 0, "prompt": 0, "hidden": 0}):
        if isinstance(piece, TextPiece):
            tokens += piece.token_ids
        elif isinstance(piece, TensorRows) and len(piece.rows):
            assert piece.rows.dtype == np.uint16
            rows[piece.port].append(np.array(piece.rows))
    asked = model.asked(ASKED)
    await model.close()
    other = TinyThinker()
    events = await read(other.engine.submit(type(asked)(asked.prompt, asked.seed, asked.max_items, taps_from=0)))
    await other.close()
    taps = torch.cat([event.taps.rows for event in events if event.taps is not None])
    assert taps.dtype == torch.bfloat16 and tokens == [item[0] for item in items(events)][: len(tokens)]
    given = np.concatenate([*rows["prompt"], *rows["hidden"]])
    assert len(given) == len(asked.prompt) + len(tokens)
    assert torch.equal(torch.from_numpy(given).view(torch.bfloat16), taps[: len(given)])
