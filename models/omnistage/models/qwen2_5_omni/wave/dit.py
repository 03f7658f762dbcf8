"""The net of the flow in Qwen2.5-Omni's Token2Wav (Xu et al. 2025): from codes and a voice it computes the slopes along which noise becomes
mel frames. A voice comes to it as a Speaker.

It is a diffusion transformer (Peebles and Xie 2023) whose frames attend within their block; a few layers also see a neighbouring block. So
attention is computed block by block, and a layer that looks back can keep the keys and values of a block for a later call, which begins
with the next block. Values that depend only on the time are computed once, for all times. Values that depend only on codes and voice are
computed once for each window.

It is Transformers' `Qwen2_5OmniToken2WavDiTModel` computed in another order: places are counted from the beginning of each frame's own
block. That makes no difference to attention, which depends only on differences of places."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as functional
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from omnistage.models.checkpoint.weights import ShapedNeed
from omnistage.models.qwen2_5_omni.wave.config import DitConfig
from omnistage.models.steps.loop import Aside
from omnistage.models.worker import by_two, still_working

NORM_EPS = 1e-6
GUIDANCE = 0.5
"""This part of the difference (slope with codes and voice, minus slope without them) is added to the slope with them, as published."""

BRANCHES = 2
"""Number of branches: first the branch with codes and voice, then the branch without them."""

TIME_WAVES = 256
TIME_SCALE = 1000.0


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear layer. weight: [out, in]. bias: [out]."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer. is_ahead: whether it sees the next block. back: its index among those that see the previous block; None: it does not."""

    query_key_value: _Linear
    output: _Linear
    up: _Linear
    down: _Linear
    is_ahead: bool
    back: int | None


class Dit:
    """The net. weight: returns a weight by its name in the checkpoint, without "token2wav.code2wav_dit_model.". times: of all evaluations,
    from 0 to 1.

    In shapes, S is a number of windows, and F a number of frames in whole blocks; a speech that ends within a block is padded. 2S rows are
    both branches of the first window, then both branches of the second window, and so on."""

    def __init__(self, config: DitConfig, weight: ShapedNeed, times: Sequence[float]) -> None:
        self.config = config
        hidden, mel, speaker = config.hidden_size, config.mel_bins, config.speaker.size

        def linear(name: str, width: int, size: int) -> _Linear:
            return _Linear(weight(f"{name}.weight", (width, size)), weight(f"{name}.bias", (width,)))

        entry = linear("input_embed.proj", hidden, mel + speaker + config.code_size + config.voice_size)
        self._enter = entry.weight[:, :mel].contiguous()
        self._condition = _Linear(entry.weight[:, mel:].contiguous(), entry.bias)
        self._codes = weight("text_embed.codec_embed.weight", (config.code_rows, config.code_size))
        self._layers = [self._layer(weight, linear, index) for index in range(config.layers)]
        self._leave = linear("proj_out", mel, hidden)
        embedded = functional.silu(_embed_times(linear, torch.tensor(times, device=self.device), hidden))
        norms = [linear(f"transformer_blocks.{index}.attn_norm.linear", 6 * hidden, hidden) for index in range(config.layers)]
        self._modulation = torch.stack([norm(embedded) for norm in norms], 1).view(len(times), config.layers, 6, hidden)
        """[times, layers, 6, hidden]: shift, scale and gate of the attention, then of the feed-forward part."""
        self._modulation[:, :, (1, 4)] += 1  # A norm is multiplied by 1 + scale.
        self._last_modulation = linear("norm_out.linear", 2 * hidden, hidden)(embedded).view(len(times), 2, hidden)
        self._last_modulation[:, 0] += 1
        self._turns = [(cosines.to(self.device), sines.to(self.device)) for cosines, sines in _turns(config)]

    def kept_shape(self) -> tuple[int, ...]:
        """The shape of the state that an evaluation leaves to the next window: for each layer that looks back, keys and values of a block,
        in both branches."""
        config = self.config
        return len(config.back_layers), 2, BRANCHES, config.block_frames, config.heads, config.head_size

    @property
    def device(self) -> torch.device:
        return self._enter.device

    def conditions(self, codes: torch.Tensor, speaker: Speaker, blocks: int) -> torch.Tensor:
        """The values that codes and a voice add to every evaluation, in both branches, [2, blocks * block_frames, hidden]; zeros after the
        last code. codes: int64 [n], below `code_rows`. blocks: number of blocks of the window."""
        frames = len(codes) * self.config.repeats
        branches = (
            (speaker.examples[:1], self._codes[codes].repeat_interleave(self.config.repeats, 0), speaker.vector),
            (speaker.examples[1:], self._codes[:1].expand(frames, -1), torch.zeros_like(speaker.vector)),
        )
        parts = [torch.cat((example.expand(frames, -1), coded, vector.expand(frames, -1)), 1) for example, coded, vector in branches]
        padding = blocks * self.config.block_frames - frames
        return functional.pad(self._condition(torch.stack(parts)), (0, 0, 0, padding))

    def slopes(
        self,
        points: torch.Tensor,
        conditions: torch.Tensor,
        evaluations: Sequence[int],
        frames: int,
        state_in: torch.Tensor | None,
        keep: int | None,
        aside: Aside | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(the slope at every point, [S, F, mel_bins]; the state that block `keep` leaves to the next window, [S, *kept_shape()], or None
        without `keep`). points: [S, F, mel_bins]. conditions: [2S, F, hidden]. evaluations: number of each window's evaluation, which is
        the index of its time. frames: number of frames without padding. state_in: the state of the block before the first block, [S,
        *kept_shape()]; None: there is no such block. aside: a thread for one of the two branches; None: both are computed on this thread,
        in one product."""
        windows, padded, mel = points.shape
        state_out = None if keep is None else points.new_empty(windows, *self.kept_shape())
        evaluation_ids = torch.tensor(evaluations, device=points.device)
        branch_slopes = points.new_empty(windows, BRANCHES, padded, mel)

        def compute(branches: slice) -> None:
            with torch.inference_mode():
                edges = _Edges.of(frames, state_in, state_out, keep, branches)
                branch_conditions = conditions.view(windows, BRANCHES, padded, -1)[:, branches]
                branch_slopes[:, branches] = self._run_net(points, branch_conditions, evaluation_ids, edges)

        if aside is None:
            compute(slice(0, BRANCHES))
        else:
            by_two(aside, partial(compute, slice(0, 1)), partial(compute, slice(1, BRANCHES)))
        conditioned, unconditioned = branch_slopes.unbind(1)
        return conditioned + (conditioned - unconditioned) * GUIDANCE, state_out

    def _run_net(self, points: torch.Tensor, conditions: torch.Tensor, evaluations: torch.Tensor, edges: _Edges) -> torch.Tensor:
        """The net's output for some branches of each window, [S, branches, F, mel_bins]. conditions: of these branches, [S, branches, F,
        hidden]."""
        branches, blocks = conditions.shape[1], points.shape[1] // self.config.block_frames
        masks = _Masks.of(self.config.block_frames, blocks, edges.frames, edges.state_in is not None, len(points) * branches, points.device)
        row_evaluations = evaluations.repeat_interleave(branches)
        modulation = self._modulation[row_evaluations].unsqueeze(3)
        x = functional.linear(points.repeat_interleave(branches, 0), self._enter) + conditions.flatten(0, 1)
        for index, layer in enumerate(self._layers):
            shift, scale, gate, shift_up, scale_up, gate_up = modulation[:, index].unbind(1)
            x = torch.addcmul(x, gate, self._attend(layer, _normalize(x, scale, shift), masks, edges))
            raised = _gelu(layer.up(_normalize(x, scale_up, shift_up)))
            x = torch.addcmul(x, gate_up, layer.down(raised))
            still_working()
        scale, shift = self._last_modulation[row_evaluations].unsqueeze(2).unbind(1)
        return self._leave(_normalize(x, scale, shift)).view(len(points), branches, points.shape[1], -1)

    def _attend(self, layer: _Layer, x: torch.Tensor, masks: _Masks, edges: _Edges) -> torch.Tensor:
        """The attention of a layer: each frame sees its block and the neighbouring blocks that the layer sees. x: normed rows, [rows, F,
        hidden]. Returns the same shape."""
        config, (rows, padded, _) = self.config, x.shape
        shape = (rows, padded // config.block_frames, config.block_frames, 3, config.heads, config.head_size)
        projections = layer.query_key_value(x).view(shape)
        query, key, value = projections.unbind(3)
        plain_key = key[..., 0, :].clone() if layer.is_ahead or layer.back is not None else key
        # Only the first head turns, because the net was trained so by mistake.
        projections[..., :2, 0, :] = self._turn(projections[..., :2, 0, :].transpose(2, 3), 0).transpose(2, 3)
        keys, values = [key], [value]
        if layer.back is not None:
            back_key = key.clone()
            back_key[..., 0, :] = self._turn(plain_key, -1)
            edges.put(layer.back, (back_key, value))
            # Each block gets the keys and values of the block before it.
            for parts, blocks, before in ((keys, back_key, edges.before(layer.back, 0)), (values, value, edges.before(layer.back, 1))):
                first = torch.zeros_like(blocks[:, :1]) if before is None else before.unsqueeze(1)
                parts.insert(0, torch.cat((first, blocks[:, :-1]), 1))
        if layer.is_ahead:
            ahead_key = key.clone()
            ahead_key[..., 0, :] = self._turn(plain_key, 1)
            # Each block gets the keys and values of the block after it.
            for parts, blocks in ((keys, ahead_key), (values, value)):
                parts.append(torch.cat((blocks[:, 1:], torch.zeros_like(blocks[:, :1])), 1))
        attention = functional.scaled_dot_product_attention(
            query.flatten(0, 1).transpose(1, 2),
            _join_blocks(keys).flatten(0, 1).transpose(1, 2),
            _join_blocks(values).flatten(0, 1).transpose(1, 2),
            attn_mask=masks.of_layer(layer.back is not None, layer.is_ahead),
        )
        return layer.output(attention.transpose(1, 2).reshape(rows, padded, -1))

    def _turn(self, x: torch.Tensor, block: int) -> torch.Tensor:
        """Vectors of one head, turned by their places, [..., block_frames, head_size]. block: where their block is, relative to the block
        that sees them: -1, 0 or 1."""
        cosines, sines = self._turns[block + 1]
        return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), sines)

    def _layer(self, weight: ShapedNeed, linear: Callable[[str, int, int], _Linear], index: int) -> _Layer:
        """Read layer number `index`."""
        config, name = self.config, f"transformer_blocks.{index}"
        inner = config.heads * config.head_size
        parts = [linear(f"{name}.attn.to_{part}", inner, config.hidden_size) for part in "qkv"]
        weights, biases = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
        # In the checkpoint, neighbouring components of a head turn together. Here component i of the first half turns with component i of
        # the second, so the components are reordered, which makes no difference to attention.
        halves = [*range(0, config.head_size, 2), *range(1, config.head_size, 2)]
        for begin in (0, inner):  # The first head of queries, and the first head of keys: no other head turns.
            head = slice(begin, begin + config.head_size)
            weights[head], biases[head] = weights[head][halves], biases[head][halves]
        return _Layer(
            _Linear(weights, biases),
            linear(f"{name}.attn.to_out.0", config.hidden_size, inner),
            linear(f"{name}.ff.ff.0", config.ffn_size, config.hidden_size),
            linear(f"{name}.ff.ff.3", config.hidden_size, config.ffn_size),
            index in config.ahead_layers,
            config.back_layers.index(index) if index in config.back_layers else None,
        )


@dataclass(frozen=True, slots=True)
class _Edges:
    """The state that some branches of windows get from the previous windows, and leave to the next windows. frames: number of frames
    without padding. state_in: of the previous windows, [S, back_layers, 2, branches, ...]; None: there is none. state_out: is filled with
    the state of block `keep`; None: no state is kept."""

    frames: int
    state_in: torch.Tensor | None
    state_out: torch.Tensor | None
    keep: int

    @classmethod
    def of(cls, frames: int, state_in: torch.Tensor | None, state_out: torch.Tensor | None, keep: int | None, branches: slice) -> _Edges:
        """state_in, state_out: with both branches. branches: the branches to use."""
        state_in, state_out = (None if each is None else each[:, :, :, branches] for each in (state_in, state_out))
        return cls(frames, state_in, state_out, keep or 0)

    def before(self, layer: int, part: int) -> torch.Tensor | None:
        """Keys (part 0) or values (part 1) of the block before the first block, [rows, block_frames, heads, head_size]; None: there is
        none."""
        return None if self.state_in is None else self.state_in[:, layer, part].flatten(0, 1)

    def put(self, layer: int, parts: Sequence[torch.Tensor]) -> None:
        """Store the keys and values of block `keep` of a layer. parts: keys and values of all blocks, [rows, blocks, block_frames, heads,
        head_size]."""
        if self.state_out is not None:
            for part, each in enumerate(parts):
                self.state_out[:, layer, part] = each[:, self.keep].view(self.state_out[:, layer, part].shape)


class _Masks:
    """Makes masks of the keys that exist: the first and the last block of a window may lack a neighbour, and the last may be padded.

    Each mask is bool [rows * blocks, 1, block, keys], or None if all keys exist."""

    def __init__(self, is_frame: torch.Tensor, rows: int, has_left: bool) -> None:
        """is_frame: whether each frame of each block exists, bool [blocks, block]. rows: number of rows. has_left: whether there is a
        previous block."""
        self._is_frame, self._rows, self._has_left = is_frame, rows, has_left
        self._masks: dict[tuple[bool, bool], torch.Tensor | None] = {}

    @classmethod
    def of(cls, block: int, blocks: int, frames: int, has_left: bool, rows: int, device: torch.device) -> _Masks:
        return cls((torch.arange(blocks * block, device=device) < frames).view(blocks, block), rows, has_left)

    def of_layer(self, is_back: bool, is_ahead: bool) -> torch.Tensor | None:
        """The mask of the layers that see the previous block (is_back), and the next block (is_ahead)."""
        if (is_back, is_ahead) not in self._masks:
            self._masks[is_back, is_ahead] = self._make(is_back, is_ahead)
        return self._masks[is_back, is_ahead]

    def _make(self, is_back: bool, is_ahead: bool) -> torch.Tensor | None:
        """Make the mask of `of_layer`."""
        is_frame, parts = self._is_frame, [self._is_frame]
        if is_back:
            first = torch.full_like(is_frame[:1], self._has_left)
            parts.insert(0, torch.cat((first, is_frame[:-1])))
        if is_ahead:
            parts.append(torch.cat((is_frame[1:], torch.zeros_like(is_frame[:1]))))
        mask = torch.cat(parts, 1)
        if bool(mask.all()):
            return None
        return mask.repeat(self._rows, 1)[:, None, None, :].expand(-1, 1, is_frame.shape[1], -1)


def _normalize(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Layer norm of x without weights, times `scale`, plus `shift`."""
    return torch.addcmul(shift, functional.layer_norm(x, x.shape[-1:], eps=NORM_EPS), scale)


def _join_blocks(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the blocks that a layer sees along their frames, [rows, blocks, frames, heads, head_size]."""
    return torch.cat(list(parts), 2) if len(parts) > 1 else parts[0]


def _gelu(x: torch.Tensor) -> torch.Tensor:
    """As functional.gelu with approximate="tanh", but twice as fast on a CPU, by 1 + tanh(y) = 2 sigmoid(2y)."""
    slope = 2 * math.sqrt(2 / math.pi)
    return (x * x).mul_(slope * 0.044715).add_(slope).mul_(x).sigmoid_().mul_(x)


def _embed_times(linear: Callable[[str, int, int], _Linear], times: torch.Tensor, hidden: int) -> torch.Tensor:
    """Embeddings of all times, [times, hidden]: sines and cosines of a time (Vaswani et al. 2017), through two layers."""
    half = TIME_WAVES // 2
    waves = torch.exp(torch.arange(half, device=times.device).float() * -(math.log(10000) / (half - 1)))
    turns = TIME_SCALE * times.unsqueeze(1) * waves.unsqueeze(0)
    raised = functional.silu(linear("time_embed.time_mlp.0", hidden, TIME_WAVES)(torch.cat((turns.sin(), turns.cos()), 1)))
    return linear("time_embed.time_mlp.2", hidden, hidden)(raised)


def _turns(config: DitConfig) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For the previous block, the own block and the next block: cosines and sines of their places, [block_frames, head_size] each. The
    first half of the sines is negative: a turned vector is the vector times the cosines plus its exchanged halves times the sines."""
    frequencies = 1.0 / (config.rope_theta ** (torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size))
    places = torch.arange(-config.block_frames, 2 * config.block_frames, dtype=torch.float64)
    angles = (places[:, None] * frequencies).repeat(1, 2).view(3, config.block_frames, config.head_size)
    signs = torch.cat((-torch.ones(config.head_size // 2), torch.ones(config.head_size // 2)))
    return [(angles[block].cos().float(), (angles[block].sin() * signs).float()) for block in range(3)]


@dataclass(frozen=True, slots=True)
class Speaker:
    """A voice in the form that the net of the flow needs. vector: the voice's own vector, float32 [voice_size]. examples: a vector made
    from the voice's example, and a vector made from silence of equal length, float32 [2, speaker.size]."""

    vector: torch.Tensor
    examples: torch.Tensor

    def to(self, device: torch.device) -> Speaker:
        return Speaker(self.vector.to(device), self.examples.to(device))


def example_net(config: DitConfig) -> torch.nn.Module:
    """The net (ECAPA-TDNN, Desplanques et al. 2020) that makes vectors [n, speaker.size] from examples [n, frames, mel_bins]."""
    net: torch.nn.Module = ECAPA_TimeDelayNet(
        Qwen2_5OmniDiTConfig(
            mel_dim=config.mel_bins,
            enc_dim=config.speaker.size,
            enc_channels=list(config.speaker.channels),
            enc_kernel_sizes=list(config.speaker.kernel_sizes),
            enc_dilations=list(config.speaker.dilations),
            enc_attention_channels=config.speaker.attention_channels,
            enc_res2net_scale=config.speaker.scale,
            enc_se_channels=config.speaker.squeeze_channels,
        )
    )
    return net


def speaker_of(net: torch.nn.Module, vector: torch.Tensor, example: torch.Tensor) -> Speaker:
    """The speaker of a voice. net: from `example_net`. vector: [1, voice_size]. example: [1, frames, mel_bins]."""
    return Speaker(vector[0], net(torch.cat((example, torch.zeros_like(example)))))
