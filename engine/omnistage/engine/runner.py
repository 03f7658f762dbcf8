"""Runs rows of sequences through a decoder and the cache: token ids in, logits out."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from omnistage.engine.adapter import Attention, Decoder
from omnistage.engine.attention import BatchedDecodeAttention, PrefillAttention, Row, SingleDecodeAttention, batches_are_exact
from omnistage.engine.kv import KVCache
from omnistage.engine.linear import pad_rows
from omnistage.engine.scheduler import Chunk, Sequence


class Runner:
    """Runs steps one after the other on the calling thread."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._decode_attention: type[BatchedDecodeAttention | SingleDecodeAttention] = (
            BatchedDecodeAttention if batches_are_exact(decoder.spec) else SingleDecodeAttention
        )

    def decode(self, sequences: Rows[Sequence]) -> torch.Tensor:
        """Compute the newest token of each sequence. Returns logits [len(sequences), vocab]."""
        rows = [Row(sequence.known - 1, sequence.pages) for sequence in sequences]
        tokens = [sequence.token(sequence.known - 1) for sequence in sequences]
        hidden = self._run(tokens, rows, self._decode_attention(self._cache, self._decoder.spec, rows))
        return self._decoder.logits(hidden)[: len(rows)]

    def chunk(self, chunk: Chunk) -> torch.Tensor | None:
        """Compute a chunk of a prompt, or of a history, whose rows get the shape that decoding gave them. Returns logits [1, vocab] of its
        last row if the chunk is the sequence's last, else None."""
        sequence = chunk.sequence
        places = range(chunk.start, chunk.start + chunk.count)
        rows = [Row(position, sequence.pages) for position in places]
        attention: Attention
        if chunk.of_prompt:
            attention = PrefillAttention(self._cache, self._decoder.spec, sequence.pages, chunk.start, chunk.count)
        else:
            attention = self._decode_attention(self._cache, self._decoder.spec, rows)
        hidden = self._run([sequence.token(position) for position in places], rows, attention)
        if not chunk.last:
            return None
        last = hidden[chunk.count - 1 : chunk.count]
        return self._decoder.logits(last.expand(pad_rows(1), -1).contiguous())[:1]

    def _run(self, tokens: list[int], rows: Rows[Row], attention: Attention) -> torch.Tensor:
        padding = [0] * (pad_rows(len(rows)) - len(rows))
        positions = [row.position for row in rows]
        return self._decoder.hidden(torch.tensor(tokens + padding), torch.tensor(positions + padding), attention)
