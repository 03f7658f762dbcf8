"""The encoders of Qwen3-Omni: pictures, films and sound become rows of the Thinker. All products run as the engine's do
(omnistage.engine.linear), so the rows of a medium do not depend on other media in the pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
import torch.nn.functional as functional
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from omnistage.engine.linear import LinearMaker
from omnistage.models.encoders.encoder import Grid, LayerNorm, Need, Rotation, Segments, WhisperLayer, places_of, product_of, sinusoids
from omnistage.models.qwen3_omni.config import CHUNK_ROWS, AudioConfig, VisionConfig, convolved_length

NORM_EPS = 1e-6

COLUMNS = 32
"""An activation gets a multiple of this many columns, because otherwise the bits of a row could depend on other rows (see
engine.parts)."""


class VisionEncoder:
    """The encoder of pictures and films; implements the common VisionEncoder. weight: returns a weight by its name without
    "thinker.visual.".

    It is Transformers' `Qwen3OmniMoeVisionEncoder`: a vision transformer with layer norms, learned positions that are interpolated for the
    picture's size, rotary positions on two axes and attention within a frame. At the end, patches are merged two by two on each side. After
    some layers, patches are merged too, to rows that the decoder adds after its first layers (DeepStack, Meng et al. 2024). The numbers of
    such a row are appended to the numbers of its output row."""

    def __init__(self, config: VisionConfig, weight: Need, linear: LinearMaker) -> None:
        self.config = config
        patches = weight("patch_embed.proj.weight").reshape(config.hidden_size, config.patch_values)
        self._embed = linear(patches, weight("patch_embed.proj.bias"))
        self._positions = weight("pos_embed.weight").clone()
        self.device, self.dtype = self._positions.device, self._positions.dtype
        self._blocks = [_Block(weight, f"blocks.{index}", config.heads, linear) for index in range(config.layers)]
        self._merger = _Merger(weight, "merger", config, linear, is_merged_first=False)
        self._deepstack = {
            layer: _Merger(weight, f"merger_list.{number}", config, linear, is_merged_first=True)
            for number, layer in enumerate(config.deepstack)
        }

    def encode(self, patches: torch.Tensor, grids: Sequence[Grid], on_layer: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        """See common's VisionEncoder; a row has row_size numbers."""
        config = self.config
        x = self._embed(patches) + self._interpolate_positions(grids)
        rotation = Rotation.of(places_of(grids, config.merge, x.device), config.hidden_size // config.heads, config.rope_theta)
        frames = Segments([grid.height * grid.width for grid in grids for _ in range(grid.frames)])
        stacked = list[torch.Tensor]()
        for layer, block in enumerate(self._blocks):
            on_layer()
            x = block(x, rotation, frames)
            if layer in self._deepstack:
                stacked.append(self._deepstack[layer](x))
        rows = torch.cat((self._merger(x), *stacked), 1)
        return list(torch.split(rows, [grid.patches // config.unit for grid in grids]))

    def _interpolate_positions(self, grids: Sequence[Grid]) -> torch.Tensor:
        """The learned position of each patch, interpolated from the table, [patches, hidden_size]."""
        sizes = torch.tensor([[grid.frames, grid.height, grid.width] for grid in grids], device=self.device)
        indices, shares = get_vision_interpolation_indices_and_weights(
            sizes, self.config.grid, align_corners=True, spatial_merge_size=self.config.merge
        )
        corners = [self._positions[indices[:, corner]] * shares[:, corner, None] for corner in range(indices.shape[1])]
        # One after the other, because a sum of the library may add in another order if there are more rows.
        return reduce(torch.add, corners).to(self.dtype)


class _Block:
    """One layer, from rows [patches, hidden_size] to the same shape. name: beginning of the names of its weights. When it is called: turn:
    the positions. frames: which patches see each other."""

    def __init__(self, weight: Need, name: str, heads: int, linear: LinearMaker) -> None:
        self._heads = heads
        self._attention_norm, self._ffn_norm = (LayerNorm.of(weight, f"{name}.{norm}", NORM_EPS) for norm in ("norm1", "norm2"))
        self._query_key_value, self._output = (product_of(weight, f"{name}.attn.{part}", linear) for part in ("qkv", "proj"))
        up, up_bias, down = (weight(f"{name}.mlp.{part}") for part in ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight"))
        missing = -len(up) % COLUMNS
        self._up = linear(functional.pad(up, (0, 0, 0, missing)), functional.pad(up_bias, (0, missing)))
        self._down = linear(functional.pad(down, (0, missing)), weight(f"{name}.mlp.linear_fc2.bias"))

    def __call__(self, x: torch.Tensor, rotation: Rotation, frames: Segments) -> torch.Tensor:
        query, key, value = self._query_key_value(self._attention_norm(x)).view(len(x), 3, self._heads, -1).unbind(1)
        x = x + self._output(frames.attention(rotation(query), rotation(key), value))
        return x + self._down(functional.gelu(self._up(self._ffn_norm(x)), approximate="tanh"))


class _Merger:
    """Joins each `config.unit` patches, rows [patches, hidden_size], to one row, and maps it to the width of the Thinker. is_merged_first:
    whether they are joined before the norm; if not, after it."""

    def __init__(self, weight: Need, name: str, config: VisionConfig, linear: LinearMaker, *, is_merged_first: bool) -> None:
        self._width, self._is_merged_first = config.unit * config.hidden_size, is_merged_first
        self._norm = LayerNorm.of(weight, f"{name}.ln_q", NORM_EPS)
        self._first, self._second = (product_of(weight, f"{name}.mlp.{index}", linear) for index in (0, 2))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = self._norm(x.view(-1, self._width)) if self._is_merged_first else self._norm(x).view(-1, self._width)
        return self._second(functional.gelu(self._first(normed)))


# Sound -------------------------------------------------------------------------------------------------------------------------------


CHUNKS = 8
"""Number of chunks that go through the convolutions at once, to bound the memory of these."""


class AudioEncoder:
    """The sound encoder; implements the common AudioEncoder. weight: returns a weight by its name without "thinker.audio_tower.".

    It is Transformers' `Qwen3OmniMoeAudioEncoder`: three convolutions over time and pitch see chunks of a second, each by itself; Whisper's
    layers see windows of several chunks. A second has 13 rows. A convolution is computed as a product of three by three numbers at a time.

    If a sound is longer than a chunk, its last chunk is padded with silence to a whole one, as in Transformers. Transformers also pads a
    sound that is shorter than a chunk if a longer sound is in the same conversation, and then its last row differs; here a sound always has
    the rows that it has alone."""

    def __init__(self, config: AudioConfig, weight: Need, linear: LinearMaker) -> None:
        self.config = config
        names = ("conv2d1", "conv2d2", "conv2d3")
        self._convolutions = [linear(weight(f"{name}.weight").flatten(1), weight(f"{name}.bias")) for name in names]
        join_weight = weight("conv_out.weight")
        self._join = linear(join_weight, None)
        self.device, self.dtype = join_weight.device, join_weight.dtype
        self._positions = sinusoids(config.positions, config.hidden_size).to(self.device, self.dtype)
        self._layers = [WhisperLayer(weight, f"layers.{index}", config.heads, linear, has_key_bias=True) for index in range(config.layers)]
        self._norm = LayerNorm.of(weight, "ln_post")
        self._first, self._second = (product_of(weight, name, linear) for name in ("proj1", "proj2"))

    def rows(self, frames: int) -> int:
        """Number of rows that this many frames of a spectrogram become."""
        full_chunks, rest = divmod(frames, self.config.chunk)
        return full_chunks * CHUNK_ROWS + convolved_length(rest)

    def pieces(self, spectrogram: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cut a spectrogram into windows of attention. A rest that is shorter than a chunk stays with the previous window, because it must
        be padded."""
        pieces = list(torch.split(spectrogram, self.config.piece))
        if len(pieces) > 1 and len(pieces[-1]) < self.config.chunk:
            pieces[-2:] = [torch.cat(pieces[-2:])]
        return pieces

    def encode(self, spectrograms: Sequence[torch.Tensor], on_layer: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        """See common's AudioEncoder; a row has row_size numbers. spectrograms: at least 1 frame each."""
        config = self.config
        x = self._convolve(spectrograms)
        counts = [self.rows(len(spectrogram)) for spectrogram in spectrograms]
        window = CHUNK_ROWS * config.piece // config.chunk
        segments = Segments([min(window, count - first) for count in counts for first in range(0, count, window)])
        for layer in self._layers:
            on_layer()
            x = layer(x, segments)
        rows = self._second(functional.gelu(self._first(self._norm(x))))
        return list(torch.split(functional.pad(rows, (0, config.row_size - config.output_size)), counts))

    def _convolve(self, spectrograms: Sequence[torch.Tensor]) -> torch.Tensor:
        """The results of the convolutions for all chunks, plus the positions of rows in their chunks, [rows, hidden_size]."""
        chunks, rows = list[torch.Tensor](), list[int]()
        for spectrogram in spectrograms:
            for chunk in torch.split(spectrogram, self.config.chunk):
                missing = self.config.chunk - len(chunk) if len(spectrogram) > self.config.chunk else 0
                chunks.append(functional.pad(chunk, (0, 0, 0, missing)))
                rows.append(convolved_length(len(chunk)))
        outputs = list[torch.Tensor]()
        for first in range(0, len(chunks), CHUNKS):
            batch = chunks[first : first + CHUNKS]
            if len({len(chunk) for chunk in batch}) == 1:
                outputs += self._convolve_alike(torch.stack(batch))
            else:
                outputs += [self._convolve_alike(chunk[None])[0] for chunk in batch]
        return torch.cat([chunk[:count] + self._positions[:count] for chunk, count in zip(outputs, rows, strict=True)])

    def _convolve_alike(self, chunks: torch.Tensor) -> torch.Tensor:
        """Apply the convolutions to chunks of equal length. chunks: [chunks, frames, bins]. Returns [chunks, rows, hidden_size]."""
        x = chunks.mT[:, None]  # [chunks, channels, bins, frames], here and after each convolution
        for convolution in self._convolutions:
            height, width = ((side - 1) // 2 + 1 for side in x.shape[2:])
            nines = functional.unfold(x, 3, padding=1, stride=2).mT.flatten(0, 1)
            x = functional.gelu(convolution(nines)).view(len(chunks), height, width, -1).permute(0, 3, 1, 2)
        features = x.permute(0, 3, 1, 2).flatten(2)
        return self._join(features.flatten(0, 1)).view(*features.shape[:2], -1)
