"""Rows of a product have the same bits in any company; a backend that breaks its claim is found out, and no weight uses it any more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional

from helpers import lengths
from helpers.engines import TINY, tiny_weights
from omnistage.engine import linear
from omnistage.engine.adapter import StepRows
from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.linear import (
    Fixed,
    Linear,
    LinearProduct,
    Linears,
    Packed,
    RowsDiffer,
    in_blocks,
    multiplies_bfloat16,
    rows_that_differ,
    viable_products,
)

CPU = torch.device("cpu")
FIXED = (Fixed("blocks of 64 rows", 64, 64, "cuda"), Fixed("row by row", 1, 1))
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]


class Lying(Packed):
    """A backend whose result depends on the number of rows, from some number of rows on, if the weight is `wide`."""

    def run(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product = super().run(x, packed, bias)
        return product * 1.5 if product.shape[1] == TINY.hidden_size and x.shape[1] == TINY.ffn_size and len(x) in (5, 21) else product


@lengths.drawn_cells(2, "shape", [*SHAPES, (49152, 576)])
def test_rows_of_a_product_do_not_depend_on_the_batch(dtype: torch.dtype, shape: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=generator).mul_(0.05).to(dtype)
    product = Linears(next(viable_products(dtype, CPU)))(weight)
    x = torch.randn(128, shape[1], generator=generator).to(dtype)
    whole = product(x)
    for rows in (*range(1, 36), 48, 63, 64, 65, 100):
        assert torch.equal(product(x[-rows:].contiguous()), whole[-rows:]), f"the last {rows} rows"
        assert torch.equal(product(x[:rows].contiguous()), whole[:rows]), f"the first {rows} rows"


@lengths.drawn_cells(3, "shape", SHAPES)
def test_the_library_keeps_its_promise_for_any_weight(dtype: torch.dtype, shape: tuple[int, int], seed: int) -> None:
    """Batching rests on this: a block of 32 rows costs hardly more than one of 4. The last backend would run its rows one by one."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(20):
        weight = torch.randn(*shape, generator=generator).to(dtype)
        assert not rows_that_differ(Linear(weight, None, Packed()).run, weight, Packed())


@pytest.mark.parametrize("product", [Packed(), replace(Packed(), most=8), *FIXED], ids=lambda product: f"{product.name} {product.most}")
def test_any_number_of_rows_runs_in_blocks_that_the_backend_takes(dtype: torch.dtype, product: LinearProduct) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(24, 40, generator=generator).to(dtype), torch.randn(24, generator=generator).to(dtype)
    made, ran = Linear(weight, bias, product), list[int]()

    def run(part: torch.Tensor) -> torch.Tensor:
        ran.append(part.shape[0])
        return made.run(part)

    for rows in range(1, 3 * product.most + 2):
        x = torch.randn(rows, 40, generator=generator).to(dtype)
        torch.testing.assert_close(in_blocks(run, x, product), functional.linear(x, weight, bias))
    assert min(ran) == product.least and max(ran) == product.most


@pytest.mark.parametrize("product", FIXED, ids=lambda product: product.name)
def test_a_product_of_one_size_needs_no_claim_about_sizes(dtype: torch.dtype, product: LinearProduct, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(96, 80, generator=generator).to(dtype)
    made = Linear(weight, None, product)
    assert not rows_that_differ(made.run, weight, product)
    x = torch.randn(70, 80, generator=generator).to(dtype)
    assert all(torch.equal(made(x[index : index + 1]), made(x)[index : index + 1]) for index in range(70))


@pytest.mark.parametrize("lie", range(4, 32))
def test_a_product_whose_rows_depend_on_their_number_is_found_out(dtype: torch.dtype, lie: int) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return x + (len(x) == lie)

    assert rows_that_differ(run, torch.zeros(1, 16, dtype=dtype), Packed()) == lie
    # Only the first weight of a shape is tried with all sizes; another one is tried with a few of them, so one of sixteen weights finds the
    # fault.
    found = [rows_that_differ(run, torch.zeros(1, 16, dtype=dtype), Packed(), range(4, 33)[first::16]) for first in range(16)]
    assert found.count(lie) == 1


def test_a_product_whose_rows_depend_on_their_place_is_found_out(dtype: torch.dtype) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(len(x))[:, None]

    assert rows_that_differ(run, torch.zeros(1, 16, dtype=dtype), Packed()) == 4
    assert rows_that_differ(run, torch.zeros(1, 16, dtype=dtype), FIXED[0]) == 64


def test_a_broken_claim_moves_all_weights_to_the_next_backend_and_is_told(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    assert PackedDecoder(TINY, tiny_weights(dtype)).products.startswith("packed")
    monkeypatch.setattr(linear, "PRODUCTS", (Lying(), FIXED[1]))
    decoder = PackedDecoder(TINY, tiny_weights(dtype))
    assert decoder.products == f"row by row; packed: 5 rows times [{TINY.hidden_size}, {TINY.ffn_size}] are not those of 32 rows"
    monkeypatch.setattr(Lying, "run", None)  # A product that still used the old backend would fail.
    nothing = torch.zeros(1, 4, dtype=torch.int64)
    hidden = decoder.hidden(StepRows(nothing.T, nothing), lambda layer, queries, keys_values: queries.flatten(1))
    assert decoder.logits(hidden.last).shape == (4, TINY.vocab_size)


def test_the_last_backend_of_a_table_that_breaks_its_claim_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "PRODUCTS", (Lying(),))
    with pytest.raises(RowsDiffer, match="packed: 5 rows"):
        PackedDecoder(TINY, tiny_weights(torch.float32))


def test_every_device_has_a_backend_and_the_processor_has_the_packed_one(dtype: torch.dtype) -> None:
    def names(device: str) -> list[str]:
        return [product.name for product in viable_products(dtype, torch.device(device))]

    many = ["packed to 64 rows"] if dtype == torch.float32 or not multiplies_bfloat16() else []
    assert names("cpu") == [*many, "packed", "row by row"]
    assert names("cuda") == ["blocks of 64 rows", "row by row"]
    assert names("meta") == ["row by row"]
