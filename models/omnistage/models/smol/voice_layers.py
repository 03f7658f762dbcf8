"""The two building blocks of the voice: a ConvNeXt block and the text encoder.

The shapes and names follow the graph `hibari.onnx` of the package hibari-tts 0.2.1 (Apache-2.0); time is the first axis here, channels
the last, so that every step but the convolution over time works on rows that lie together in memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
