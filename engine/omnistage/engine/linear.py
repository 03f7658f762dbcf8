"""Matrix products whose rows do not depend on the other rows of the batch.

A row of `x @ W.T` has the same bits in every batch only if the library computes it in one way for every batch size. A `LinearProduct` is a
way to compute products, with the numbers of rows for which it claims equal bits. The table `PRODUCTS` has all ways, best first. The claim
is checked for every weight when the weight is loaded; if it fails for any weight, `build_exact` takes the next way for all weights.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as functional

MIN_ROWS = 4
"""Fewest rows of a step, padding included. With so many rows, no product has to add padding of its own."""

_TURNS = 16
"""Number of weights of one shape that together try all numbers of rows, each a part of them."""

_LARGE = 1 << 23
"""A weight of more elements is tried with a part of the numbers of rows, because a whole trial would take seconds."""

_INPUTS = 2
"""Number of random inputs for the trial of a weight; each number of rows is tried with one of these inputs."""

Built = TypeVar("Built")


def multiplies_bfloat16() -> bool:
    """Whether oneDNN has kernels of bfloat16 for this CPU."""
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _format(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which oneDNN multiplies weights of `dtype` on this CPU."""
    return torch.float32 if dtype == torch.bfloat16 and not multiplies_bfloat16() else dtype


class RowsDiffer(ValueError):
    """The bits of a row depend on the other rows of a product, contrary to the claim of its backend."""


class LinearProduct(Protocol):
    """A way to compute products of one weight. min_rows, max_rows: fewest and most rows for one call of `run`; more rows are computed in
    blocks, fewer are padded."""

    @property
    def name(self) -> str: ...

    @property
    def min_rows(self) -> int: ...

    @property
    def max_rows(self) -> int: ...

    def is_viable(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether this machine can run it for weights of this dtype on this device."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight [out, in] in the form that `run` needs; it may be the same memory."""

    def run(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product of rows. x: [rows, in], contiguous, `min_rows` to `max_rows` rows. Returns [rows, out]."""


@dataclass(frozen=True, slots=True)
class Packed:
    """oneDNN on a CPU, with weights that are re-ordered once into the layout of its kernels.

    Rows have equal bits in products of 4 to 32 rows, with AMX and without. For one row, and with AMX for 48 rows and more, oneDNN runs
    another kernel. With AMX 32 rows cost hardly more than 4. In float32 the arithmetic dominates: 64 rows at once cost a quarter less than
    32 rows twice. A CPU that does not multiply bfloat16 gets the weights in float32: they take twice the memory, and are many times as fast
    as the library's bfloat16 there. At small batches packed weights are twice as fast as `torch.nn.functional.linear`, which re-orders them
    at every call."""

    name: str = "packed"
    min_rows: int = MIN_ROWS
    max_rows: int = 32

    def is_viable(self, dtype: torch.dtype, device: torch.device) -> bool:
        if device.type != "cpu" or not torch._C._has_mkldnn or dtype not in (torch.float32, torch.bfloat16):
            return False
        return self.max_rows <= 32 or _format(dtype) == torch.float32  # With AMX, more rows of bfloat16 may have other bits.

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.to(_format(weight.dtype)), self.min_rows)
        return packed

    def run(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        packed_bias = None if bias is None else bias.to(packed.dtype)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.to(packed.dtype), packed, packed_bias, "none", [], "")
        return product.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Fixed:
    """PyTorch's own product, always with the same number of rows, so that the library has nothing to choose.

    device_type: the only type of device that it is for; "": any. On "cuda" a product of 64 rows costs no more than reading the weight."""

    name: str
    min_rows: int
    max_rows: int
    device_type: str = ""

    def is_viable(self, dtype: torch.dtype, device: torch.device) -> bool:
        return self.device_type in ("", device.type)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def run(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x, packed, bias)


PRODUCTS: tuple[LinearProduct, ...] = (
    Packed("packed to 64 rows", max_rows=64),
    Packed(),
    Fixed("blocks of 64 rows", 64, 64, "cuda"),
    Fixed("row by row", 1, 1),
)
"""All ways, best first. The last way cannot break the claim, because it computes each row alone."""

WHOLE_PRODUCT = Fixed("whole", 1, sys.maxsize)
"""Any number of rows in one product, without a claim: for a computation whose rows are always alone in their product, always in the same
number."""


def viable_products(dtype: torch.dtype, device: torch.device) -> Iterator[LinearProduct]:
    """The ways that work for this dtype and device, best first; at least one."""
    return (product for product in PRODUCTS if product.is_viable(dtype, device))


def pad_rows(count: int) -> int:
    """Number of rows, padding included, in which to compute `count` rows."""
    return max(count, MIN_ROWS)


class Linear:
    """Computes `x [rows, in] -> [rows, out]` for one weight `[out, in]` and an optional bias `[out]`, for any number of rows.

    It keeps a packed weight and a copy of the bias, and lets the tensors of the caller go, so that a memory-mapped checkpoint leaves memory
    after one reading."""

    __slots__ = ("_bias", "_packed", "_product")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, product: LinearProduct) -> None:
        self._product, self._packed, self._bias = product, product.pack(weight), None if bias is None else bias.clone()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return in_blocks(self.run, x, self._product)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """One product. x: [rows, in], `min_rows` to `max_rows` rows of the backend."""
        return self._product.run(x, self._packed, self._bias)


class LinearMaker(Protocol):
    """Makes the product of a weight [out, in] and an optional bias [out]."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear: ...


class Linears:
    """Makes the products of one model, all with one backend, and tries each of them out.

    The library chooses its kernel by shape and number of rows. So the first weight of a shape is tried with every number of rows up to 32
    and every fourth above. Each later weight of the shape is tried with another sixteenth of these numbers. A large weight is a head, the
    only weight of its shape: it is tried with a fourth of the numbers."""

    def __init__(self, product: LinearProduct) -> None:
        self._product = product
        self._weight_counts: Counter[torch.Size] = Counter()

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Make the product of a weight [out, in] and try it out. Raises RowsDiffer."""
        earlier_weights = self._weight_counts[weight.shape]
        self._weight_counts[weight.shape] += 1
        linear = Linear(weight, bias, self._product)
        sizes = [rows for rows in range(self._product.min_rows, self._product.max_rows + 1) if rows <= 32 or rows % 4 == 0]
        first_turns = 1 if weight.numel() <= _LARGE else 4
        turns = _TURNS if earlier_weights else first_turns
        if rows := rows_that_differ(linear.run, weight, self._product, sizes[earlier_weights % turns :: turns]):
            raise RowsDiffer(f"{self._product.name}: {rows} rows times {list(weight.shape)} are not those of {self._product.max_rows} rows")
        return linear


def make_whole(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Make the product of any number of rows at once, see WHOLE_PRODUCT. Implements LinearMaker."""
    return Linear(weight, bias, WHOLE_PRODUCT)


def build_exact(build: Callable[[Linears], Built], dtype: torch.dtype, device: torch.device) -> tuple[Built, str]:
    """Call `build` with the best backend that keeps its claim for all weights that `build` makes products of. Returns the result, and a
    text for the log: the name of the backend, and why better backends were refused. Raises RowsDiffer if no backend is left."""
    refused: list[str] = []
    for product in viable_products(dtype, device):
        try:
            built = build(Linears(product))
        except RowsDiffer as error:
            refused.append(str(error))
        else:
            return built, "; ".join((product.name, *refused))
    raise RowsDiffer("; ".join(refused))


def rows_that_differ(
    run: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor, product: LinearProduct, sizes: Iterable[int] | None = None
) -> int:
    """The first number of rows at which `run` gives a row other bits than it has in a product of `product.max_rows` rows; 0: there is none.
    weight: gives the width and dtype of the input. sizes: the numbers of rows to try; None: all for which the backend claims equal bits."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_INPUTS, product.max_rows, weight.shape[1], generator=generator).to(weight)
    references: dict[int, torch.Tensor] = {}  # by number of the input
    for rows in range(product.min_rows, product.max_rows + 1) if sizes is None else sizes:
        input_number = rows // 4 % _INPUTS  # The inputs take turns even where all numbers of rows are multiples of 4.
        if input_number not in references:
            references[input_number] = run(inputs[input_number])
        # In reverse order, so that a row has another place than in the whole product.
        if not torch.equal(run(inputs[input_number, -rows:].flip(0)), references[input_number][-rows:].flip(0)):
            return rows
    return 0


def in_blocks(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, product: LinearProduct) -> torch.Tensor:
    """`run(x)`, computed in blocks of at most `product.max_rows` rows, each padded to at least `product.min_rows`. x: any number of rows;
    the result has as many."""
    rows = x.shape[0]
    if product.min_rows <= rows <= product.max_rows:
        return run(x)
    last_block = rows % product.max_rows  # rows of the last block; 0: it is full
    padded = functional.pad(x, (0, 0, 0, product.min_rows - last_block)) if 0 < last_block < product.min_rows else x
    if padded.shape[0] <= product.max_rows:
        return run(padded)[:rows]
    return torch.cat([run(part.contiguous()) for part in torch.split(padded, product.max_rows)])[:rows]
