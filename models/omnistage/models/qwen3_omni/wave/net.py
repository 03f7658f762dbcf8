"""The net of Qwen3-Omni's Code2Wav: makes samples from frames of codes, for many speeches at once; each speech goes on from the state of
its last step, which has the same size however many frames came before.

codes --mean of embeddings--> rows --layers that see a window of the past--> rows --upsamplings, each with a ConvNeXt block-->
--convolution, upsamplings with residual units, convolution--> samples

It only looks back, except that each upsampling of the decoder looks one of its inputs ahead: samples of a step's last frame come with the
next step.

The bits of a speech's samples do not depend on other speeches: `engine.linear` multiplies rows, and on a CPU oneDNN computes convolutions
of every size, although torch has another way for a small convolution that is alone. Transposed convolutions are written as products and
convolutions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from omnistage.engine.linear import Linear, LinearMaker, make_whole
from omnistage.models.checkpoint.weights import ShapedNeed
from omnistage.models.qwen3_omni.wave.config import DILATIONS, KERNEL, WaveConfig

NEXT_EPSILON = 1e-6
"""The epsilon of the norm in a ConvNeXt block."""


class CausalNet:
    """The net. weight: returns a weight by its name in the checkpoint, without "code2wav.". linear: makes the products of rows."""

    def __init__(self, config: WaveConfig, weight: ShapedNeed, linear: LinearMaker = make_whole) -> None:
        self.config = config
        rows = config.codebooks * config.codes
        self._codes = weight("code_embedding.weight", (rows, config.hidden_size))
        self._offsets = torch.arange(0, rows, config.codes, device=self._codes.device)
        self._layers = [_layer(config, weight, linear, f"pre_transformer.layers.{number}.") for number in range(config.layers)]
        self._norm = _norm(config, weight, "pre_transformer.norm.weight")
        self._turning = 1.0 / config.rope_theta ** (torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size)
        self._widening = [_widening(config, weight, linear, number) for number in range(len(config.widening))]
        self._enter = _convolution(weight, "decoder.0.conv", config.channels, config.hidden_size, KERNEL)
        self._blocks = [_block(config, weight, number) for number in range(len(config.rates))]
        last, channels = len(config.rates) + 1, config.channels >> len(config.rates)
        self._snake = _snake(weight, f"decoder.{last}", channels)
        self._leave = _convolution(weight, f"decoder.{last + 1}.conv", 1, channels, KERNEL)

    @property
    def device(self) -> torch.device:
        return self._codes.device

    def start(self, place: int = 0) -> WaveState:
        """The state before a frame, made without earlier frames. place: number of the frame in its speech. If it is above 0, samples are
        right only from the frame `place + WaveConfig.frames_before` on."""
        config = self.config
        keys = self._codes.new_zeros(config.layers, 2, config.kv_heads, config.window - 1, config.head_size)
        return WaveState(place, 0, keys, tuple(self._codes.new_zeros(*shape) for shape in self._kept_shapes(first=place == 0)))

    def step(self, codes: torch.Tensor, states: Sequence[WaveState], *, silent: bool = False) -> tuple[torch.Tensor, list[WaveState]]:
        """Compute (samples, float32 [speeches, samples] in -1..1; the states after them). codes: int64 [speeches, frames, codebooks];
        either all speeches or no speech is at its first frame. silent: make no samples, and do not run the convolutions, whose old inputs
        stay in the states."""
        hidden, keys = self._run_layers(self._codes[codes + self._offsets].mean(2), states)
        frames = codes.shape[1]
        key_counts = [min(state.key_count + frames, self.config.window - 1) for state in states]
        if silent:
            samples, inputs = hidden.new_empty(len(states), 0), [state.inputs for state in states]
        else:
            before = ConvolutionInputs(states)
            samples = self._make_samples(hidden, before)
            inputs = [tuple(before.copy_inputs(speech)) for speech in range(len(states))]
        parts = zip(states, key_counts, keys, inputs, strict=True)
        after = [WaveState(state.place + frames, count, state_keys, state_inputs) for state, count, state_keys, state_inputs in parts]
        return samples, after

    def _run_layers(self, x: torch.Tensor, states: Sequence[WaveState]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the layers. x: [speeches, frames, hidden_size]. Returns (the output, in the same shape; for each speech the keys and values
        that its state keeps, see WaveState)."""
        frames, past_count = x.shape[1], self.config.window - 1
        places = torch.tensor([state.place for state in states])[:, None] + torch.arange(frames)
        cos, sin = (part.to(x)[:, None] for part in self._turned(places))
        mask = self._mask(frames, [state.key_count for state in states]).to(x.device)
        before, after = torch.stack([state.keys for state in states]), list[torch.Tensor]()
        for number, layer in enumerate(self._layers):
            x, keys = layer(x, before[:, number], mask, cos, sin)
            after.append(keys[..., keys.shape[3] - past_count :, :])
        kept_keys = torch.stack(after, 1)
        return self._norm(x), [keys.clone() for keys in kept_keys]

    def _turned(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cosines, sines) that turn heads, [speeches, frames, head_size] each, in float32 as in Transformers. places: [speeches,
        frames]."""
        angles = places[..., None].float() * self._turning
        return torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1)

    def _mask(self, frames: int, key_counts: Sequence[int]) -> torch.Tensor:
        """Whether each frame sees each key, bool [speeches, 1, frames, window - 1 + frames]; past keys stand before new keys. key_counts:
        for each speech, how many past keys belong to frames; the other past keys are zeros."""
        past_count = self.config.window - 1
        key, frame = torch.arange(past_count + frames), torch.arange(frames)[:, None]
        is_filled = key >= past_count - torch.tensor(key_counts)[:, None, None, None]
        return is_filled & (key >= frame) & (key <= frame + past_count)

    def _make_samples(self, x: torch.Tensor, before: ConvolutionInputs) -> torch.Tensor:
        """The samples, [speeches, samples], of the rows in x, [speeches, frames, hidden_size]. before: past inputs of the convolutions,
        which also collects the inputs for the next step."""
        for widen, block in self._widening:
            x = block(widen(x), before)
        x = self._enter(x.transpose(1, 2), before)
        for upsampling, units in self._blocks:
            x = upsampling(x, before)
            for unit in units:
                x = unit(x, before)
        return self._leave(self._snake(x), before).squeeze(1).clamp(-1.0, 1.0)

    def _kept_shapes(self, *, first: bool) -> list[tuple[int, int]]:
        """The shapes of the past inputs that each convolution keeps, in order. first: whether the state is before the first frame of a
        speech, so that an upsampling has no past input; in other states an unknown input is zero."""
        config, past = self.config, KERNEL - 1
        shapes = [(config.hidden_size, past)] * (len(config.widening) + 1)
        for number in range(len(config.rates)):
            channels = config.channels >> number
            shapes += [(channels, 0 if first else 1), *((channels // 2, past * dilation) for dilation in DILATIONS)]
        return [*shapes, (config.channels >> len(config.rates), past)]


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm by the root of the mean square."""

    weight: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer. heads: number of heads of queries. kv_heads: number of heads of keys, and of values. attention_scale, ffn_scale: factors
    by which the outputs of the two parts are multiplied, [hidden_size]."""

    heads: int
    kv_heads: int
    attention_norm: _Norm
    attention_in: Linear
    attention_out: Linear
    attention_scale: torch.Tensor
    ffn_norm: _Norm
    ffn_in: Linear
    ffn_out: Linear
    ffn_scale: torch.Tensor

    def __call__(
        self, x: torch.Tensor, before: torch.Tensor, mask: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output of the layer, [speeches, frames, hidden_size]; the past keys and values followed by the new ones). x: [speeches, frames,
        hidden_size]. before: past keys and values, [speeches, 2, kv_heads, window - 1, head_size]. mask, cos, sin: see `CausalNet`."""
        projections = _rows(self.attention_in, self.attention_norm(x))
        projections = projections.view(*projections.shape[:2], self.heads + 2 * self.kv_heads, -1).transpose(1, 2)
        turning, values = projections.tensor_split((self.heads + self.kv_heads,), 1)
        low, high = turning.chunk(2, -1)
        queries, keys = (turning * cos + torch.cat((-high, low), -1) * sin).tensor_split((self.heads,), 1)
        keys_values = torch.cat((before, torch.stack((keys, values), 1)), 3)
        attention = functional.scaled_dot_product_attention(
            queries, keys_values[:, 0], keys_values[:, 1], attn_mask=mask, enable_gqa=self.heads != self.kv_heads
        )
        x = torch.addcmul(x, self.attention_scale, _rows(self.attention_out, attention.transpose(1, 2).flatten(2)))
        gate, up = _rows(self.ffn_in, self.ffn_norm(x)).chunk(2, -1)
        return torch.addcmul(x, self.ffn_scale, _rows(self.ffn_out, functional.silu(gate) * up)), keys_values


def _rows(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """Apply a product to rows: from [speeches, count, in] to [speeches, count, out]."""
    return linear(x.flatten(0, 1)).view(*x.shape[:2], -1)


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution that sees only the past. groups: number of groups of channels that do not see each other."""

    weight: torch.Tensor
    bias: torch.Tensor
    dilation: int = 1
    groups: int = 1

    def __call__(self, x: torch.Tensor, before: ConvolutionInputs) -> torch.Tensor:
        """x: new inputs, [speeches, channels, count]; returns the same number of outputs. before: the past inputs."""
        if past := self.dilation * (self.weight.shape[2] - 1):
            x = before.join(x, past)
        if x.device.type == "cpu" and x.dtype == torch.float32 and torch._C._has_mkldnn:
            return torch.mkldnn_convolution(x, self.weight, self.bias, [0], [1], [self.dilation], self.groups)
        return functional.conv1d(x, self.weight, self.bias, dilation=self.dilation, groups=self.groups)


@dataclass(frozen=True, slots=True)
class _Snake:
    """The activation x + sin(frequency * x)^2 / height (SnakeBeta). frequency, inverse_height: [channels, 1]."""

    frequency: torch.Tensor
    inverse_height: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.sin(x * self.frequency)
        return torch.addcmul(x, turned.mul_(turned), self.inverse_height)


@dataclass(frozen=True, slots=True)
class _Upsampling:
    """Makes `rate` outputs from each pair of consecutive inputs. It equals a transposed convolution with 2 * rate weights, without the
    outputs at the ends, which depend on a single input. pair: the convolution that makes all outputs of a pair, as channels."""

    snake: _Snake
    pair: _Convolution
    rate: int

    def __call__(self, x: torch.Tensor, before: ConvolutionInputs) -> torch.Tensor:
        output = self.pair(self.snake(x), before)
        return output.view(len(x), self.rate, -1, output.shape[2]).permute(0, 2, 3, 1).flatten(2)


@dataclass(frozen=True, slots=True)
class _Widening:
    """Makes `factor` rows from each row: from [speeches, count, width] to [speeches, factor * count, width]."""

    linear: Linear
    factor: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _rows(self.linear, x).view(len(x), self.factor * x.shape[1], -1)


@dataclass(frozen=True, slots=True)
class _Next:
    """A ConvNeXt block (Liu et al. 2022)."""

    along: _Convolution
    norm: torch.Tensor
    norm_bias: torch.Tensor
    into: Linear
    out: Linear
    scale: torch.Tensor

    def __call__(self, x: torch.Tensor, before: ConvolutionInputs) -> torch.Tensor:
        features = self.along(x.transpose(1, 2), before).transpose(1, 2)
        features = functional.layer_norm(features, self.norm.shape, self.norm, self.norm_bias, NEXT_EPSILON)
        return torch.addcmul(x, self.scale, _rows(self.out, functional.gelu(_rows(self.into, features))))


@dataclass(frozen=True, slots=True)
class _Unit:
    """A residual unit: adds to the signal the result of two activations and convolutions."""

    first: _Snake
    far_convolution: _Convolution
    second: _Snake
    near_convolution: _Convolution

    def __call__(self, x: torch.Tensor, before: ConvolutionInputs) -> torch.Tensor:
        return x + self.near_convolution(self.second(self.far_convolution(self.first(x), before)), before)


# From the weights ------------------------------------------------------------------------------------------------------------------


def _norm(config: WaveConfig, weight: ShapedNeed, name: str) -> _Norm:
    return _Norm(weight(name, (config.hidden_size,)), config.norm_epsilon)


def _layer(config: WaveConfig, weight: ShapedNeed, linear: LinearMaker, prefix: str) -> _Layer:
    """Read a layer. prefix: beginning of the names of its weights."""
    hidden, queries, keys = config.hidden_size, config.heads * config.head_size, config.kv_heads * config.head_size

    def product(size: int, *parts: tuple[str, int], biased: bool = False) -> Linear:
        """Several weights as one product."""
        matrix = torch.cat([weight(f"{prefix}{part}.weight", (out, size)) for part, out in parts])
        return linear(matrix, torch.cat([weight(f"{prefix}{part}.bias", (out,)) for part, out in parts]) if biased else None)

    into = (("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys))
    return _Layer(
        config.heads,
        config.kv_heads,
        _norm(config, weight, f"{prefix}input_layernorm.weight"),
        product(hidden, *into, biased=config.attention_bias),
        product(queries, ("self_attn.o_proj", hidden), biased=config.attention_bias),
        weight(f"{prefix}self_attn_layer_scale.scale", (hidden,)),
        _norm(config, weight, f"{prefix}post_attention_layernorm.weight"),
        product(hidden, ("mlp.gate_proj", config.ffn_size), ("mlp.up_proj", config.ffn_size)),
        product(config.ffn_size, ("mlp.down_proj", hidden)),
        weight(f"{prefix}mlp_layer_scale.scale", (hidden,)),
    )


def _convolution(
    weight: ShapedNeed, name: str, channels: int, inputs: int, kernel: int, dilation: int = 1, groups: int = 1
) -> _Convolution:
    """Read a convolution. channels, inputs: numbers of output and input channels. kernel: width of the kernel."""
    parameters = weight(f"{name}.weight", (channels, inputs // groups, kernel)), weight(f"{name}.bias", (channels,))
    return _Convolution(*parameters, dilation, groups)


def _snake(weight: ShapedNeed, name: str, channels: int) -> _Snake:
    frequency, height = (weight(f"{name}.{part}", (channels,)).exp().unsqueeze(1) for part in ("alpha", "beta"))
    return _Snake(frequency, 1.0 / (height + 1e-9))


def _widening(config: WaveConfig, weight: ShapedNeed, linear: LinearMaker, number: int) -> tuple[_Widening, _Next]:
    """Read upsampling number `number` before the decoder, and the ConvNeXt block that follows it."""
    size, factor, name = config.hidden_size, config.widening[number], f"upsample.{number}"

    def product(part: str, out: int, into: int) -> Linear:
        return linear(weight(f"{name}.1.{part}.weight", (out, into)), weight(f"{name}.1.{part}.bias", (out,)))

    steps = weight(f"{name}.0.conv.weight", (size, size, factor)).permute(2, 1, 0).flatten(0, 1).contiguous()
    widen = _Widening(linear(steps, weight(f"{name}.0.conv.bias", (size,)).repeat(factor)), factor)
    block = _Next(
        _convolution(weight, f"{name}.1.dwconv.conv", size, size, KERNEL, groups=size),
        weight(f"{name}.1.norm.weight", (size,)),
        weight(f"{name}.1.norm.bias", (size,)),
        product("pwconv1", 4 * size, size),
        product("pwconv2", size, 4 * size),
        weight(f"{name}.1.gamma", (size,)),
    )
    return widen, block


def _block(config: WaveConfig, weight: ShapedNeed, number: int) -> tuple[_Upsampling, Sequence[_Unit]]:
    """Read upsampling number `number` of the decoder, and its residual units."""
    inputs, rate, name = config.channels >> number, config.rates[number], f"decoder.{number + 1}.block"
    channels = inputs // 2
    # Output i * rate + step is input i times weight step + rate, plus input i + 1 times weight step.
    later_weight, own_weight = weight(f"{name}.1.conv.weight", (inputs, channels, 2 * rate)).permute(2, 1, 0).tensor_split((rate,))
    pair = _Convolution(torch.stack((own_weight, later_weight), 3).flatten(0, 1), weight(f"{name}.1.conv.bias", (channels,)).repeat(rate))
    units = [
        _Unit(
            _snake(weight, f"{name}.{place}.act1", channels),
            _convolution(weight, f"{name}.{place}.conv1.conv", channels, channels, KERNEL, dilation),
            _snake(weight, f"{name}.{place}.act2", channels),
            _convolution(weight, f"{name}.{place}.conv2.conv", channels, channels, 1),
        )
        for place, dilation in enumerate(DILATIONS, 2)
    ]
    return _Upsampling(_snake(weight, f"{name}.0", inputs), pair, rate), units


@dataclass(frozen=True, slots=True)
class WaveState:
    """The state before a frame. place: number of this frame in its speech. key_count: how many keys, counted from the last, belong to
    frames; the other keys are zeros. keys: keys and values of the last frames, [layers, 2, kv_heads, window - 1, head_size]. inputs: the
    last inputs of each convolution, in the order in which the net runs them, [channels, count] each; zeros before the first frame, as
    in Transformers.

    A step makes a new state and changes no old state, so a step that fails loses nothing."""

    place: int
    key_count: int
    keys: torch.Tensor
    inputs: tuple[torch.Tensor, ...]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.keys, *self.inputs))


class ConvolutionInputs:
    """The past inputs of the convolutions of one step, which the convolutions use in order: each puts its past inputs before its new
    inputs."""

    def __init__(self, states: Sequence[WaveState]) -> None:
        self._before = iter([torch.stack(each) for each in zip(*(state.inputs for state in states), strict=True)])
        self._next_inputs: list[torch.Tensor] = []

    def join(self, x: torch.Tensor, keep: int) -> torch.Tensor:
        """The past inputs of the next convolution, followed by its new inputs. x: the new inputs, [speeches, channels, count]. keep: number
        of the last inputs that the next step needs."""
        inputs = torch.cat((next(self._before), x), 2)
        self._next_inputs.append(inputs[..., inputs.shape[2] - keep :])
        return inputs

    def copy_inputs(self, speech: int) -> Iterable[torch.Tensor]:
        """The inputs that one speech leaves to the next step, by convolution. They are copies, because a view would keep the inputs of all
        speeches."""
        return (inputs[speech].clone() for inputs in self._next_inputs)
