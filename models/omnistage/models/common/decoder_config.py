"""Reads the config of a decoder from a config.json: its sizes, its experts, and the axes of its rows' positions."""

from __future__ import annotations

from dataclasses import dataclass

from omnistage.engine.parts import DecoderConfig, ExpertSizes
from omnistage.models.common.checkpoint import BadCheckpoint, Config

MOST_POSITIONS = 1 << 22
"""Largest number of positions of a decoder, since each has angles in memory: four times as many as any published decoder has."""

LEAST_THETA = 1
"""Smallest theta. With a smaller theta, later pairs of components would turn faster instead of slower, and with a much smaller theta their
angles would not be finite."""

USUAL_THETA = 10_000.0
"""Theta of the published encoders and Code2Wavs."""

BIASED = ("q_proj", "k_proj", "v_proj")
"""The products with a bias in decoders of Qwen2.5-Omni, whose configs do not mention it."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The settings by which queries and keys turn with their positions (rotary embedding). theta: base of the frequencies. sections: number
    of pairs of components of a head that turn with time, with height and with width; empty: positions have one axis."""

    theta: float
    sections: tuple[int, ...] = ()


def decoder_sizes(config: Config, *, ffn_size: str = "intermediate_size") -> DecoderConfig:
    """Read a decoder's sizes. ffn_size: the config's name for the width between the products of a layer or expert. Raises BadCheckpoint."""
    check_activation(config, "hidden_act", "silu")
    _check_sees_all(config)
    return DecoderConfig(
        layers=config.size("num_hidden_layers"),
        hidden_size=config.size("hidden_size"),
        ffn_size=config.size(ffn_size),
        query_heads=config.size("num_attention_heads"),
        kv_heads=config.size("num_key_value_heads"),
        vocab_size=config.size("vocab_size"),
        context=config.size("max_position_embeddings", MOST_POSITIONS),
        norm_eps=config.at_least("rms_norm_eps", 0),
        head_size=config.size("head_dim") if config.has("head_dim") else 0,
    )


def expert_sizes(config: Config, *, normalized: bool, shared: str = "") -> ExpertSizes:
    """Read the sizes of experts, in both spellings: `num_experts` of the published checkpoints, and `num_local_experts` of Transformers 5.
    normalized: whether the weights of the chosen experts add up to 1, if the config does not say. shared: the config's name for the width
    of the expert that all rows go through; empty: there is none. Raises BadCheckpoint."""
    dense = config.values("mlp_only_layers", int) if config.has("mlp_only_layers") else ()
    if dense or config.value("decoder_sparse_step", int, 1) != 1:
        raise BadCheckpoint(f"{config.place}: layers without experts are not supported; no published checkpoint has them")
    sizes = ExpertSizes(
        experts=config.size("num_local_experts" if config.has("num_local_experts") else "num_experts"),
        chosen=config.size("num_experts_per_tok"),
        size=config.size("moe_intermediate_size"),
        normalized=config.value("norm_topk_prob", bool, normalized),
        shared=config.size(shared) if shared else 0,
    )
    if sizes.chosen > sizes.experts:
        raise BadCheckpoint(f"{config.place}: 'num_experts_per_tok' is {sizes.chosen}, of {sizes.experts} experts")
    return sizes


def rope_of(config: Config, *, axes: int = 0, default_sections: tuple[int, ...] = ()) -> RopeConfig:
    """Read the rotary embedding of a decoder. axes: number of axes of positions; 0: one axis and no sections. default_sections: sections if
    the config has none. Raises BadCheckpoint."""
    rope, theta = _read_rope(config, ("default", "mrope"), None)
    if not axes:
        return RopeConfig(theta)
    sections = default_sections if default_sections and not rope.has("mrope_section") else rope.values("mrope_section", int)
    if len(sections) != axes or min(sections) < 1:
        raise BadCheckpoint(f"{config.place}: 'mrope_section' is {list(sections)}: it needs a number above 0 for each of {axes} axes")
    return RopeConfig(theta, sections)


def rope_theta_of(config: Config, kind: str = "default") -> float:
    """Theta of a model that is no decoder; USUAL_THETA if the config has none, as most configs. kind: the model's type of positions. Raises
    BadCheckpoint."""
    return _read_rope(config, (kind,), USUAL_THETA)[1]


def _read_rope(config: Config, kinds: tuple[str, ...], default_theta: float | None) -> tuple[Config, float]:
    """(the config's object about positions, theta). Published checkpoints have `rope_theta`, some also `rope_scaling`; Transformers 5
    writes `rope_parameters`. The first of these two objects that is not empty is used; its theta wins over a theta outside of it. kinds:
    supported types; the first is assumed if the config names none. default_theta: theta if the config has none; None: then it is an
    error."""
    name = next((name for name in ("rope_scaling", "rope_parameters") if config.raw.get(name)), None)
    rope = config.section(name) if name else Config({}, config.place)
    if (kind := rope.value("rope_type", str, "") or rope.value("type", str, kinds[0])) not in kinds:
        raise BadCheckpoint(f"{config.place}: positions of the type {kind!r} are not supported, only the {kinds[0]} ones")
    return rope, (rope if rope.has("rope_theta") else config).at_least("rope_theta", LEAST_THETA, default_theta)


def attention_biases(config: Config) -> tuple[str, ...]:
    """Names of the products of attention that have a bias; empty: none has. Raises BadCheckpoint."""
    return (*BIASED, "o_proj") if config.value("attention_bias", bool, False) else ()


def check_activation(config: Config, name: str, activation: str) -> None:
    """Raises BadCheckpoint if the config names another activation than `activation`. name: the config's key."""
    if (value := config.value(name, str, activation)) != activation:
        raise BadCheckpoint(f"{config.place}: {name!r} is {value!r}, and only {activation!r} is supported")


def _check_sees_all(config: Config) -> None:
    """Raises BadCheckpoint for layers that see only the last rows. A window counts only if `layer_types` or `use_sliding_window` turn it
    on."""
    kinds = config.raw.get("layer_types")
    if isinstance(kinds, list):
        windows = set(map(str, kinds)) != {"full_attention"}
    else:
        windows = config.value("use_sliding_window", bool, config.has("sliding_window"))
    if windows:
        raise BadCheckpoint(f"{config.place}: sliding windows of attention are not supported; no published checkpoint has them")
