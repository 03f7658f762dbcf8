"""The Talker's nets: phoneme ids in, one row a speech frame out (40 frames a second).

A row holds everything that Code2Wav needs: the spoken content (the decoder's own text features), pitch and loudness, and the place of the
row in its phrase. So Code2Wav is purely convolutional and sees the borders of a phrase in the rows themselves.

The shapes and names of the nets' blocks follow the graph `hibari.onnx` of the package hibari-tts 0.2.1 (Apache-2.0); time is the first axis
here, channels the last, so that every step but the convolution over time works on rows that lie together in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FRAME_RATE_HZ = 40
TEXT_WIDTH = 128
F0 = slice(TEXT_WIDTH, TEXT_WIDTH + 2)
ENERGY = slice(TEXT_WIDTH + 2, TEXT_WIDTH + 4)
INDEX = TEXT_WIDTH + 4
COUNT = TEXT_WIDTH + 5
FEATURE_WIDTH = TEXT_WIDTH + 6
"""A row: [128 text features, f0 at 80 Hz twice (Hz), energy twice, index of the row in its phrase, rows of the phrase]."""

DILATIONS = (1, 2, 4, 8, 1, 2)


@dataclass(frozen=True, slots=True)
class Silence:
    """How many rows of silence a phrase may keep before and after it: the net predicts 0.3 s before and 0.4 s after every phrase."""

    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Timed:
    """Phonemes and their lengths. ids: [n] int64. text: text features, [n, 192]. durations: [n] int64, rows. first, end: rows to keep."""

    ids: Tensor
    text: Tensor
    durations: Tensor
    first: int
    end: int

    @property
    def count(self) -> int:
        """Number of kept rows."""
        return self.end - self.first

    def begins(self) -> list[int]:
        """For each phoneme the kept row with which it begins, then the number of kept rows."""
        ends = self.durations.cumsum(0) - self.first
        return [0, *ends.clamp(0, self.count).tolist()]


def at_speed(durations: Tensor, speed: float) -> Tensor:
    """The durations at another speed, [n] int64, each at least 1. durations: in rows, [n] int64, each at least 1. The new sum is the old
    sum divided by the speed, rounded, but at least n. Where a duration must stay at 1 row, those beside it become shorter."""
    exact_ends = durations.cumsum(0).div(speed).round().long().tolist()
    # The largest end of the first duration that leaves a row for each of the others.
    max_first_end = max(exact_ends[-1], len(exact_ends)) - len(exact_ends) + 1
    ends, end = list[int](), 0
    for index, exact_end in enumerate(exact_ends):
        end = max(min(exact_end, max_first_end + index), end + 1)
        ends.append(end)
    return torch.tensor(ends).diff(prepend=torch.zeros(1, dtype=torch.int64))


class ProsodyNet(nn.Module):
    """Predicts the length of each phoneme, and pitch and energy of every frame. symbols: number of phoneme ids. heads: attention heads."""

    def __init__(self, symbols: int, heads: int) -> None:
        super().__init__()
        self.text = TextEncoder(symbols, 192, 384, heads, repeats=6)
        self.dur = nn.ModuleDict({"0": nn.Conv1d(192, 192, 3, padding=1), "2": nn.Conv1d(192, 1, 1)})
        self.pro_in = nn.Conv1d(192, 192, 1)
        self.pro = nn.ModuleList(ConvNeXtBlock(192, 384, 7, dilation) for dilation in DILATIONS)
        self.pro_out = nn.Conv1d(192, 4, 1)

    def durations(self, text: Tensor) -> Tensor:
        """Text features [n, 192] -> the number of rows that each phoneme lasts, [n] int64, at least 1."""
        hidden = F.gelu(self.dur["0"](text.T[None]))
        raw: Tensor = self.dur["2"](hidden)[0, 0]
        return raw.exp().sub(1).round().clamp(min=1).long()

    def contour(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Text features of every row [t, 192] -> f0 in Hz and energy, both [t, 2]: two values a row, 80 a second."""
        rows = self.pro_in(text.T[None])[0].T
        for block in self.pro:
            rows = block(rows)
        out = self.pro_out(rows.T[None])[0].T
        return out[:, 0:2] * 100, out[:, 2:4] * 5


class FeatureNet(nn.Module):
    """All of the Talker's weights; symbols, heads: as in ProsodyNet. `pn` and `m.text` are the names in the original graph."""

    def __init__(self, symbols: int, heads: int) -> None:
        super().__init__()
        self.pn = ProsodyNet(symbols, heads)
        self.m = nn.ModuleDict({"text": TextEncoder(symbols, TEXT_WIDTH, 2 * TEXT_WIDTH, heads, repeats=4)})

    @torch.inference_mode()
    def timed(self, ids: Tensor, speed: float, silence: Silence) -> Timed:
        """Predict the length of each phoneme. ids: [n] int64, a pad first and last. speed: 2 speaks twice as fast."""
        text = self.pn.text(ids)
        slow = self.pn.durations(text)
        first = max(int(slow[0]) - silence.before, 0)
        end = int(slow.sum()) - max(int(slow[-1]) - silence.after, 0)
        durations = at_speed(slow, speed)
        kept_first, sounds_end, rows = round(first / speed), int(durations[:-1].sum()), int(durations.sum())
        kept_end = kept_first + round((end - first) / speed)
        return Timed(ids, text, durations, kept_first, min(max(kept_end, sounds_end), rows))  # Only silence is cut off.

    @torch.inference_mode()
    def forward(self, timed: Timed) -> Tensor:
        """Make the kept rows of these phonemes, [timed.count, FEATURE_WIDTH] float32."""
        phoneme = torch.repeat_interleave(torch.arange(len(timed.ids)), timed.durations)
        # The contour net was trained on phrases with all of their silence: silence is cut off after the net, not before.
        f0, energy = self.pn.contour(timed.text[phoneme])
        span = slice(timed.first, timed.end)
        place = torch.stack([torch.arange(timed.count), torch.full((timed.count,), timed.count)], dim=1)
        return torch.cat([self.m["text"](timed.ids)[phoneme[span]], f0[span], energy[span], place.float()], dim=1)


# The blocks of the nets --------------------------------------------------------------------------------------------------------------


class DepthwiseConv(nn.Module):
    """A convolution over time with one filter a channel, without padding: [rows, channels] -> [rows - reach, channels], at least 0 rows.
    It adds shifted rows: that is faster than the general convolution at these sizes, and a row of the result has the same bits in any
    number of rows."""

    def __init__(self, channels: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, kernel))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.kernel = kernel  # Taps of a filter.
        self.dilation = dilation  # Rows from one tap to the next.
        self.reach = (kernel - 1) * dilation  # Rows from the first tap to the last.

    def forward(self, rows: Tensor) -> Tensor:
        count = max(rows.shape[0] - self.reach, 0)
        taps = self.weight[:, 0].unbind(1)
        out = self.bias.expand(count, -1)
        for index, tap in enumerate(taps):
            first = index * self.dilation
            out = torch.addcmul(out, rows[first : first + count], tap)
        return out


class ConvNeXtBlock(nn.Module):
    """x + gamma * MLP(norm(depthwise(x))) over time (Liu et al. 2022, arXiv:2201.03545, section 2). hidden: width of the MLP."""

    def __init__(self, channels: int, hidden: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.dw = DepthwiseConv(channels, kernel, dilation)
        self.norm = nn.LayerNorm(channels)
        self.pw1 = nn.Linear(channels, hidden)
        self.pw2 = nn.Linear(hidden, channels)
        self.gamma = nn.Parameter(torch.ones(channels))

    def inner(self, rows: Tensor) -> Tensor:
        """Compute the middle rows [n - reach, channels] of rows [n, channels]; the reach / 2 rows on each side are only context."""
        mixed = self.dw(rows)
        half = self.dw.reach // 2
        centre = rows[half : half + mixed.shape[0]]
        return torch.addcmul(centre, self.gamma, self.pw2(F.gelu(self.pw1(self.norm(mixed)))))

    def forward(self, rows: Tensor) -> Tensor:
        """Compute all rows of a whole sequence, with zeros as context around it: [n, channels] -> [n, channels]."""
        half = self.dw.reach // 2
        return self.inner(F.pad(rows, (0, 0, half, half)))


class SelfAttention(nn.Module):
    """Multi-head self-attention over one sequence without positions: [n, channels] -> [n, channels]."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * channels, channels))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * channels))
        self.out_proj = nn.Linear(channels, channels)

    def forward(self, rows: Tensor) -> Tensor:
        count, channels = rows.shape
        packed = F.linear(rows, self.in_proj_weight, self.in_proj_bias)
        query, key, value = packed.view(count, 3, self.heads, channels // self.heads).permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(query[None], key[None], value[None])[0]
        out: Tensor = self.out_proj(mixed.transpose(0, 1).reshape(count, channels))
        return out


class AttentionLayer(nn.Module):
    """A Transformer layer with the norms before attention and MLP: [n, channels] -> [n, channels]. hidden: width of the MLP."""

    def __init__(self, channels: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.self_attn = SelfAttention(channels, heads)
        self.norm2 = nn.LayerNorm(channels)
        self.linear1 = nn.Linear(channels, hidden)
        self.linear2 = nn.Linear(hidden, channels)

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows + self.self_attn(self.norm1(rows))
        out: Tensor = rows + self.linear2(F.gelu(self.linear1(self.norm2(rows))))
        return out


class TextEncoder(nn.Module):
    """Phoneme ids [n] int64 -> features [n, channels]: embedding, two ConvNeXt blocks, ONE attention layer applied `repeats` times."""

    def __init__(self, symbols: int, channels: int, hidden: int, heads: int, repeats: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(symbols, channels)
        self.convs = nn.ModuleList(ConvNeXtBlock(channels, hidden, kernel=5) for _ in range(2))
        self.attn = AttentionLayer(channels, hidden, heads)
        self.norm = nn.LayerNorm(channels)
        self.repeats = repeats

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.emb(ids)
        for block in self.convs:
            rows = block(rows)
        for _ in range(self.repeats):
            rows = self.attn(rows)
        out: Tensor = self.norm(rows)
        return out
