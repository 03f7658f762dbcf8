"""The decoder of a checkpoint: its sizes, its experts and the axes of its rows' positions in a config.json; the weights of its experts; and
its parts for the ranks of a group, by a tensor-parallel plan of Transformers.

A published checkpoint stores each expert by itself; Transformers 5 stores all experts of a layer in one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from omnistage.engine.decoder import EMBEDDING, LM_HEAD
from omnistage.engine.devices import ONE_RANK, Group
from omnistage.engine.parts import DecoderConfig, ExpertSizes
from omnistage.models.checkpoint.files import BadCheckpoint, Config
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.reports import LoadError

MAX_POSITIONS = 1 << 22
"""Largest number of positions of a decoder, since each has angles in memory: four times as many as any published decoder has."""

MIN_THETA = 1
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
        context=config.size("max_position_embeddings", MAX_POSITIONS),
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
        experts_per_row=config.size("num_experts_per_tok"),
        size=config.size("moe_intermediate_size"),
        normalized=config.value("norm_topk_prob", bool, normalized),
        shared=config.size(shared) if shared else 0,
    )
    if sizes.experts_per_row > sizes.experts:
        raise BadCheckpoint(f"{config.place}: 'num_experts_per_tok' is {sizes.experts_per_row}, of {sizes.experts} experts")
    return sizes


def rope_of(config: Config, *, axes: int = 0, default_sections: tuple[int, ...] = ()) -> RopeConfig:
    """Read the rotary embedding of a decoder. axes: number of axes of positions; 0: one axis and no sections. default_sections: sections if
    the config has none. Raises BadCheckpoint."""
    rope, theta = _read_rope(config, ("default", "mrope"), None)
    if not axes:
        return RopeConfig(theta)
    # Without defaults, reading raises the error for a missing list.
    sections = rope.values("mrope_section", int) if rope.has("mrope_section") or not default_sections else default_sections
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
    kind = rope.value("rope_type", str, "") or rope.value("type", str, kinds[0])
    if kind not in kinds:
        raise BadCheckpoint(f"{config.place}: positions of the type {kind!r} are not supported, only the {kinds[0]} ones")
    return rope, (rope if rope.has("rope_theta") else config).at_least("rope_theta", MIN_THETA, default_theta)


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
        has_windows = set(map(str, kinds)) != {"full_attention"}
    else:
        has_windows = config.value("use_sliding_window", bool, config.has("sliding_window"))
    if has_windows:
        raise BadCheckpoint(f"{config.place}: sliding windows of attention are not supported; no published checkpoint has them")


_PARTS = {"gate_proj.weight": ("gate_up_proj", 0), "up_proj.weight": ("gate_up_proj", 1), "down_proj.weight": ("down_proj", None)}
"""Name of an expert's weight -> the tensor that has this weight for all experts, and which half of the expert's rows in that tensor it is;
None: all rows."""


def check_experts(weights: Weights, mlp: str, sizes: ExpertSizes, hidden: int, group: Group = ONE_RANK) -> None:
    """Raises BadCheckpoint for a missing or misshapen expert of a layer, of any rank. mlp: beginning of the weights' names. hidden: width
    of a row. group: the ranks; weights that other ranks read are reported to `weights.leave`. The number of experts that are stored
    together is checked too, because nothing else would notice a surplus expert."""
    shapes = dict.fromkeys(("gate_proj.weight", "up_proj.weight"), (sizes.size, hidden)) | {"down_proj.weight": (hidden, sizes.size)}
    for part, (rows, columns) in shapes.items():
        joint_part, half = _PARTS[part]
        joint_name = f"{mlp}.experts.{joint_part}"
        if joint_name in weights.header:
            weights.check_shape(joint_name, (sizes.experts, rows if half is None else 2 * rows, columns))
            continue
        for expert in range(sizes.experts):
            weights.check_shape(f"{mlp}.experts.{expert}.{part}", (rows, columns))
        other_ranks_experts = set(range(sizes.experts)).difference(sizes.of_rank(group))
        weights.leave(f"{mlp}.experts.{expert}.{part}" for expert in other_ranks_experts)


def expert_of_all(weights: Weights, name: str) -> torch.Tensor | None:
    """The weight of one expert, cut out of the tensor of all experts. name: PREFIX.experts.NUMBER.gate_proj.weight and so on, as in
    published checkpoints. None: the name is of another form, or there is no such weight."""
    module, separator, rest = name.rpartition(".experts.")
    number, _, part = rest.partition(".")
    if not separator or not number.isdigit() or part not in _PARTS:
        return None
    joint_part, half = _PARTS[part]
    joint_name = f"{module}.experts.{joint_part}"
    stored = weights.header.get(joint_name)
    if stored is None or len(stored.shape) != 3 or int(number) >= stored.shape[0]:
        return None
    expert = weights.read(joint_name, int(number))
    return expert if half is None or expert is None else expert.tensor_split(2)[half]


Plan = Mapping[str, str]
"""Pattern of a module's name -> the style in which its weight is cut: see `transformers.integrations.tensor_parallel`."""

HEAD_PLAN: Plan = {"lm_head": "colwise_gather_output"}
"""Transformers' models add this entry to the plans of their configs. It is repeated here because importing such a model takes seconds."""

_COLUMNS = ("colwise", "colwise_gather_output")
_ROWS = "rowwise"
_WHOLE_PREFIX = "replicated"
"""Beginning of the names of styles that leave a weight whole on every rank."""

_EXPERTS = ("grouped_gemm", "ep_dispatch_experts")
"""Styles in which each rank gets some whole experts; for experts `engine.parts` supports no other styles."""


def config_of_part(config: DecoderConfig, size: int, others: Mapping[str, int] | None = None) -> DecoderConfig:
    """The config of one of `size` ranks. others: name for errors -> size that the ranks divide too, in a decoder with experts; None: the
    decoder has no experts, and the columns of its FFN are divided. Raises LoadError for a decoder that cannot be cut into so many equal
    parts."""
    if size < 1:
        raise LoadError(f"tensor_parallel_size {size}: there is at least one rank")
    counts = {
        "query heads": config.query_heads,
        "heads of keys and values": config.kv_heads,
        **({"FFN columns": config.ffn_size} if others is None else others),
        "tokens": config.vocab_size,
    }
    if any(count % size for count in counts.values()):
        divisor = math.gcd(*counts.values())
        able = [str(number) for number in range(1, divisor + 1) if divisor % number == 0]
        counts_text = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise LoadError(f"tensor_parallel_size {size}: does not divide {counts_text} of this model; it can be {' or '.join(able)}")
    ffn_size = config.ffn_size // size if others is None else config.ffn_size
    return replace(config, query_heads=config.query_heads // size, kv_heads=config.kv_heads // size, ffn_size=ffn_size)


def weights_of_part(weight: Callable[[str], torch.Tensor | None], plan: Plan, group: Group) -> Callable[[str], torch.Tensor | None]:
    """A function that returns, by the name of a weight, the part that the rank `group.rank` has by the plan; None: there is no such weight,
    or another rank has it. weight: returns whole weights. Raises LoadError for a plan with an unknown style."""
    for pattern, style in plan.items():
        if style not in (*_COLUMNS, _ROWS, *_EXPERTS) and not style.startswith(_WHOLE_PREFIX):
            raise LoadError(f"tensor_parallel_size {group.size}: the plan cuts {pattern} {style!r}, which is not known here")

    def part(name: str) -> torch.Tensor | None:
        tensor = weight(name)
        if tensor is None and name == LM_HEAD:
            tensor = weight(EMBEDDING)  # The logits use the embedding, and each rank computes the logits of some tokens.
        style = next((style for pattern, style in plan.items() if fnmatchcase(name.rpartition(".")[0], pattern)), None)
        if tensor is None or style is None or style in _EXPERTS or style.startswith(_WHOLE_PREFIX):
            return tensor
        if style in _COLUMNS:
            return tensor.tensor_split(group.size, 0)[group.rank].clone()  # A view would keep the whole weight in memory.
        if tensor.ndim > 1:
            return tensor.tensor_split(group.size, 1)[group.rank].clone(memory_format=torch.contiguous_format)
        return tensor if group.rank == 0 else None  # The ranks' results are summed, so one rank alone adds the bias.

    return part
