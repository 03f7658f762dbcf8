"""Attention over paged keys and values. The bits of a row depend neither on the other rows of its step nor on their number.

A run is some consecutive rows of one sequence, all in one page. So all its rows see the same number of pages, and for each row the slots
after it in this page are masked. A row's scores are one product over those pages, its weights one softmax, its result one more product: the
sizes of all three depend only on the row's place in its sequence. The table `ATTENTION` has all backends, best first. When a model is
loaded, `choose_backend` tries whether rows depend on each other with its shape of heads, and takes the first backend that passes.

* `PagedAttention`, for processors: runs that see about equally many pages are one batch of products. First keys, then values are copied
  into one piece that fits into the core's cache. Masked pages change no bit as long as the library makes its sums in one sweep.
* `TritonAttention`, for accelerators: a kernel of our own, which reads pages in place. Each row has equally many neighbours in a product.
* `SdpaAttention`, for accelerators: the same batches through PyTorch's own attention, which chooses its kernel.
* `RowAttention`: each row by itself, over exactly its own length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from omnistage.engine.adapter import Attention, DecoderSpec, StepRows
from omnistage.engine.devices import to_device
from omnistage.engine.memory import PAGE_ROWS, KVCache, Scratch
from omnistage.engine.plan import PlannedRun, StepPlan

TILE_BYTES = 5 << 18
"""Largest number of bytes of keys in a batch, because the copy of the pages must still be in the processor's cache when products read
it."""

MAX_ROWS = 32
"""Largest number of rows in a product of weights and values. With more, oneDNN's bfloat16 products with AMX may give a row other bits;
`linear.Packed` has the same limit."""

_LEAST_ROWS = {torch.float32: 8}
"""Fewest rows of a product, by dtype; 1 for the others. With fewer, the library runs other kernels, which may give other bits."""

_SWEEPS: tuple[Mapping[torch.dtype, int], ...] = ({torch.float32: 12, torch.bfloat16: 32}, {torch.float32: 6, torch.bfloat16: 16}, {})
"""dtype -> number of pages over which a library sums in one sweep, so that zeros after them change no bit: MKL sums 384 slots in float32
with AVX-512 and 192 with AVX2, oneDNN 1,024 in bfloat16. The first mapping that holds on this machine is used."""

_MAX_ERRORS = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""dtype -> largest relative error of a head's output that can come from rounding."""

_ERROR_CHARACTERS = 300
"""Number of characters of an error that are shown."""

_LEAST_PRODUCT = 16**3
"""For a batched product of at most this many multiplications, PyTorch uses another kernel than for larger products."""


class AttentionBackend(Protocol):
    """One way to compute attention over the pages of a cache."""

    @property
    def name(self) -> str: ...

    @property
    def is_exact(self) -> bool:
        """Whether the backend claims that the bits of a row do not depend on other rows. A backend without this claim may be chosen too;
        the reason in `BackendChoice` then says so."""

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Errors that the backend raises if its kernels cannot be compiled on this machine; empty: it compiles no kernels. The results of a
        backend that compiles are also compared with SDPA's: see `numbers_agree`."""

    def is_viable(self, spec: DecoderSpec) -> bool:
        """Whether the backend can be used for these heads on this device."""

    def bind(self, cache: KVCache, spec: DecoderSpec, plan: StepPlan) -> Attention:
        """The attention for the rows of one step, over this cache."""


class PagedAttention:
    """Implements `AttentionBackend` for processors. Not shared between threads.

    sweep: dtype -> largest number of pages at which runs with different numbers of pages share a batch; absent: they never do."""

    is_exact = True
    failures = ()

    def __init__(self, sweep: Mapping[torch.dtype, int] = _SWEEPS[0]) -> None:
        self._sweep = sweep
        self._scratch = Scratch()

    @property
    def name(self) -> str:
        return f"paged in sweeps of {'/'.join(map(str, self._sweep.values())) or 'no'} pages"

    def is_viable(self, spec: DecoderSpec) -> bool:
        return spec.device.type == "cpu" and spec.query_heads * PAGE_ROWS * spec.head_size > _LEAST_PRODUCT

    def bind(self, cache: KVCache, spec: DecoderSpec, plan: StepPlan) -> Attention:
        return _Paged(cache, spec, plan, self._sweep.get(spec.dtype, 0), self._scratch)


class TritonAttention:
    """Implements `AttentionBackend` with our own kernel. Triton is imported late, because only builds of torch for accelerators have it."""

    name = "triton over pages"
    is_exact = True

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        from omnistage.engine.paged_kernel import TritonError

        # Errors of Triton, its assembler, the C compiler that it calls, the loading of the compiled library, and the folder that keeps it.
        return TritonError, RuntimeError, SubprocessError, AssertionError, ImportError, OSError

    def is_viable(self, spec: DecoderSpec) -> bool:
        return spec.device.type == "cuda" and torch.cuda.is_available() and find_spec("triton") is not None

    def bind(self, cache: KVCache, spec: DecoderSpec, plan: StepPlan) -> Attention:
        return _Triton(cache, spec, plan)


class SdpaAttention:
    """Implements `AttentionBackend` with PyTorch's own attention, over copies of the pages."""

    name = "sdpa over gathered pages"
    is_exact = False
    failures = ()

    def is_viable(self, spec: DecoderSpec) -> bool:
        return spec.device.type != "cpu"

    def bind(self, cache: KVCache, spec: DecoderSpec, plan: StepPlan) -> Attention:
        return _Sdpa(cache, spec, plan)


class RowAttention:
    """Implements `AttentionBackend` with one call of PyTorch's own attention for each row."""

    name = "row by row"
    is_exact = True
    failures = ()

    def is_viable(self, spec: DecoderSpec) -> bool:
        return True

    def bind(self, cache: KVCache, spec: DecoderSpec, plan: StepPlan) -> Attention:
        return _RowByRow(cache, spec, plan)


ATTENTION: tuple[Callable[[], AttentionBackend], ...] = (
    *(partial(PagedAttention, sweep) for sweep in _SWEEPS),
    TritonAttention,
    SdpaAttention,
    RowAttention,
)
"""All backends, best first. The last backend is exact everywhere, because it computes each row by itself."""


class _Bound(ABC):
    """Implements `Attention` for the rows of one plan: stores their keys and values, then lets `attend` compute. Padding is not stored, and
    its results are zeros. `_group`: number of query heads that share one head of keys."""

    def __init__(self, cache: KVCache, spec: DecoderSpec, plan: StepPlan) -> None:
        self._cache, self._spec, self._plan = cache, spec, plan
        self._group = spec.query_heads // spec.kv_heads

    def __call__(self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        plan = self._plan
        self._cache.write(layer, plan.pages, plan.places, keys_values[: plan.count])
        result = torch.empty_like(queries)
        result[plan.count :] = 0
        self.attend(layer, queries, result)
        return result.view(queries.shape[0], -1)

    @abstractmethod
    def attend(self, layer: int, queries: torch.Tensor, result: torch.Tensor) -> None:
        """Write the attention of each row of the plan into `result`. queries, result: [rows, query_heads, head_size]."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some runs with equal numbers of rows, which are attended together over as many pages as the longest of them sees.

    rows: the numbers of all rows in the step, run by run. runs: number of runs. count: rows of each run. keys, values: the rows of
    `KVCache.heads` to use, by run, head and page, int64 [runs * kv_heads * pages]. mask: 0 or -inf, added to the scores of the last
    `length` slots, [runs, 1, count, 1, length]; every row sees all slots before these."""

    rows: torch.Tensor | slice
    runs: int
    count: int
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, members: Sequence[PlannedRun], spec: DecoderSpec) -> _Tile:
        """The tile of some runs. members: runs with equal numbers of rows; the run that sees the most pages comes first."""
        device, heads, count, width = spec.device, spec.kv_heads, members[0].count, len(members[0].pages)
        # A run with fewer pages repeats its own first page: the numbers of a held page are finite, and the mask hides them.
        table = to_device(torch.tensor([(*run.pages, *run.pages[:1] * (width - len(run.pages))) for run in members]), device)
        # Rows of `KVCache.heads`: [runs, 2 * kv_heads, width].
        head_rows = (table * 2 * heads)[:, None] + torch.arange(2 * heads, device=device)[:, None]
        slots = to_device(torch.tensor([run.start for run in members]), device)[:, None] + torch.arange(count, device=device)
        # The last member sees the fewest pages. Every row sees all slots before the last of these pages.
        seen_by_all = (len(members[-1].pages) - 1) * PAGE_ROWS
        hidden = torch.arange(seen_by_all, width * PAGE_ROWS, device=device) > slots[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=spec.dtype, device=device).masked_fill_(hidden, float("-inf"))
        rows = [run.first + at for run in members for at in range(count)]
        # Rows in order are a plain slice: no copy of the queries.
        in_order = rows == list(range(rows[0], rows[0] + len(rows)))
        return cls(
            rows=slice(rows[0], rows[0] + len(rows)) if in_order else to_device(torch.tensor(rows), device),
            runs=len(members),
            count=count,
            keys=head_rows[:, :heads].flatten(),
            values=head_rows[:, heads:].flatten(),
            mask=mask[:, None, :, None],
        )


def _tiles(plan: StepPlan, spec: DecoderSpec, sweep: int) -> Iterator[_Tile]:
    """All runs of a plan, in tiles. sweep: largest number of pages at which runs with different numbers of pages share a tile.

    A call of the library costs as much as the work for some pages, so such runs share a tile where this changes no bit. The padding of
    shorter runs at most doubles the work."""
    page_key_bytes = PAGE_ROWS * spec.kv_heads * spec.head_size * spec.dtype.itemsize
    members: list[PlannedRun] = []
    for run in sorted(plan.runs, key=lambda run: (run.count, -len(run.pages))):
        if members:
            width, pages = len(members[0].pages), len(run.pages)
            may_share = run.count == members[0].count and (pages == width or (width <= sweep and 2 * pages >= width))
            if not may_share or (len(members) + 1) * width * page_key_bytes > TILE_BYTES:
                yield _Tile.of(members, spec)
                members = []
        members.append(run)
    if members:
        yield _Tile.of(members, spec)


class _Paged(_Bound):
    """Attends for `PagedAttention` in one plan, tile by tile; `attend` writes into `result`. sweep: see `_tiles`. scratch: reused memory
    for copies and results of products."""

    def __init__(self, cache: KVCache, spec: DecoderSpec, plan: StepPlan, sweep: int, scratch: Scratch) -> None:
        super().__init__(cache, spec, plan)
        self._scratch = scratch
        self._tiles = tuple(_tiles(plan, spec, sweep))

    def attend(self, layer: int, queries: torch.Tensor, result: torch.Tensor) -> None:
        heads, head_size, pages = self._spec.kv_heads, self._spec.head_size, self._cache.heads(layer)
        for tile in self._tiles:
            count, batch = tile.count, tile.runs * heads
            copied = self._scratch.take("copied", (len(tile.keys), *pages.shape[1:]), pages)
            tile_pages = torch.index_select(pages, 0, tile.keys, out=copied).view(batch, -1, head_size)
            # One product for all rows of a run and all query heads that share keys: [runs * kv_heads, count * group, head_size].
            query = queries[tile.rows].view(tile.runs, count, heads, self._group, head_size).transpose(1, 2).reshape(batch, -1, head_size)
            padded = _pad(query)
            scores = self._scratch.take("scores", (*padded.shape[:2], tile_pages.shape[1]), pages)
            scores = torch.bmm(padded, tile_pages.transpose(1, 2), out=scores)[:, : query.shape[1]]
            scores.view(tile.runs, heads, count, self._group, -1)[..., -tile.mask.shape[-1] :].add_(tile.mask)
            weights = torch.softmax(scores, -1, out=self._scratch.take("weights", scores.shape, pages))
            # The keys are no longer needed: the values overwrite their copy.
            torch.index_select(pages, 0, tile.values, out=copied)
            sums = self._sums(weights, tile_pages).reshape(tile.runs, heads, count, self._group, head_size)
            result[tile.rows] = sums.transpose(1, 2).reshape(tile.runs * count, -1, head_size)

    def _sums(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """weights @ values, computed for at most MAX_ROWS rows at a time. weights: [batch, rows, length]. values: [batch, length,
        head_size]."""
        rows = weights.shape[1]
        if rows <= MAX_ROWS:
            return torch.bmm(_pad(weights), values)[:, :rows]
        sums = list[torch.Tensor]()
        # Parts of equal size, so that none has fewer rows than a product must have.
        for part in weights.tensor_split(-(-rows // MAX_ROWS), 1):
            # The scores are no longer needed, and their memory is large enough.
            block = self._scratch.take("scores", part.shape, weights).copy_(part)
            sums.append(torch.bmm(block, values))
        return torch.cat(sums, 1)


def _pad(rows: torch.Tensor) -> torch.Tensor:
    """Add rows of zeros to [batch, n, width], up to the fewest rows that a product must have."""
    short = _LEAST_ROWS.get(rows.dtype, 1) - rows.shape[1]
    return functional.pad(rows, (0, 0, 0, short)) if short > 0 else rows


class _Triton(_Bound):
    """Attends for `TritonAttention` in one plan; `attend` writes into `result`. Each program of the kernel computes one tile of queries for
    one head of keys. `_table`: the numbers that the programs read (`paged_kernel.tiles`). `_tiles`: number of tiles."""

    def __init__(self, cache: KVCache, spec: DecoderSpec, plan: StepPlan) -> None:
        super().__init__(cache, spec, plan)
        from omnistage.engine import paged_kernel

        self._attend = paged_kernel.attend
        table, self._tiles = paged_kernel.tiles(plan.runs, self._group)
        self._table = to_device(table, spec.device)

    def attend(self, layer: int, queries: torch.Tensor, result: torch.Tensor) -> None:
        self._attend(self._spec, queries.contiguous(), self._cache.layer(layer), self._table, self._tiles, result)


class _Sdpa(_Bound):
    """Attends for `SdpaAttention` in one plan, tile by tile; `attend` writes into `result`."""

    def __init__(self, cache: KVCache, spec: DecoderSpec, plan: StepPlan) -> None:
        super().__init__(cache, spec, plan)
        # This backend does not claim exactness, so runs of any length share a tile.
        self._tiles = [(tile, self._mask(tile)) for tile in _tiles(plan, spec, spec.context)]

    def _mask(self, tile: _Tile) -> torch.Tensor:
        """The mask of a tile over all slots, repeated for the query heads that share keys: [runs, 1, count * group, length]."""
        # `tile.keys` has an entry for each run, head and page. `tile.mask` lacks the slots that every row sees.
        seen_by_all = len(tile.keys) // (tile.runs * self._spec.kv_heads) * PAGE_ROWS - tile.mask.shape[-1]
        mask = functional.pad(tile.mask, (seen_by_all, 0))
        return mask.expand(-1, -1, -1, self._group, -1).reshape(tile.runs, 1, tile.count * self._group, -1)

    def attend(self, layer: int, queries: torch.Tensor, result: torch.Tensor) -> None:
        heads, head_size, pages = self._spec.kv_heads, self._spec.head_size, self._cache.heads(layer)
        for tile, mask in self._tiles:
            runs, count = tile.runs, tile.count
            keys, values = (pages.index_select(0, indices).view(runs, heads, -1, head_size) for indices in (tile.keys, tile.values))
            # The heads that share keys become rows of one query, because the kernels with a mask support no grouped queries.
            query = queries[tile.rows].view(runs, count, heads, self._group, head_size).transpose(1, 2).reshape(runs, heads, -1, head_size)
            attended = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=1.0)
            attended = attended.view(runs, heads, count, self._group, head_size).transpose(1, 2)
            result[tile.rows] = attended.reshape(runs * count, -1, head_size)


class _RowByRow(_Bound):
    """Attends for `RowAttention` in one plan; `attend` writes into `result`. `_rows`: for each row its number in the step, how many slots
    it sees, and its pages."""

    def __init__(self, cache: KVCache, spec: DecoderSpec, plan: StepPlan) -> None:
        super().__init__(cache, spec, plan)
        self._rows = [
            (run.first + at, run.start + at + 1, to_device(torch.tensor(run.pages), spec.device))
            for run in plan.runs
            for at in range(run.count)
        ]

    def attend(self, layer: int, queries: torch.Tensor, result: torch.Tensor) -> None:
        heads, head_size = self._spec.kv_heads, queries.shape[-1]
        for row, length, table in self._rows:
            # Keys and values of the slots that the row sees: [2 * kv_heads, length, head_size].
            page_rows = self._cache.layer(layer).index_select(0, table).transpose(0, 1).flatten(1, 2)[:, :length]
            # The heads that share keys are rows of one query. The size of each product depends on this row alone.
            stacked = queries[row].view(1, heads, self._group, head_size)
            attended = functional.scaled_dot_product_attention(stacked, page_rows[None, :heads], page_rows[None, heads:], scale=1.0)
            result[row] = attended.view(heads * self._group, head_size)


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend, and a text for the log that says why it was chosen."""

    backend: AttentionBackend
    reason: str


def choose_backend(spec: DecoderSpec) -> BackendChoice:
    """The first backend for this device that passes its trial, or does not claim exactness. Raises ValueError if none is left."""
    refused = ""
    for make in ATTENTION:
        backend = make()
        if not backend.is_viable(spec):
            continue
        fault = fault_of(backend, spec)
        if not fault:
            return BackendChoice(backend, f"{backend.name}: {refused}rows had equal bits in blocks, in batches and alone at load")
        if not backend.is_exact:
            return BackendChoice(backend, f"{backend.name}: {refused}a row that is computed again may differ in its last bits")
        refused += f"not {backend.name}: {fault} at load; "
    raise ValueError(f"no way to attend on {spec.device}: {refused}")


def fault_of(backend: AttentionBackend, spec: DecoderSpec) -> str:
    """Try a backend for these heads. Returns, in words, why it must not be used; empty: it may be used."""
    try:
        if backend.failures and not numbers_agree(backend, spec):
            return "its numbers were not those of sdpa in float32"
        return "" if rows_are_independent(backend, spec) else "a row depended on its neighbours"
    except backend.failures as error:
        return f"it failed with {type(error).__name__} ({' '.join(str(error).split())[:_ERROR_CHARACTERS]})"


def numbers_agree(backend: AttentionBackend, spec: DecoderSpec) -> bool:
    """Whether the backend's results equal the results of SDPA in float32, except for rounding. They are compared for whole pages of rows,
    at several numbers of pages, and for single rows of several sequences."""
    bench, exact = _Bench(backend, spec), _Bench(SdpaAttention(), spec, torch.float32)
    with sdpa_kernel(SDPBackend.MATH):  # Its other kernels may round float32 to fewer bits.
        expected = tuple(exact.rows())
    return all(
        bool(((result.float() - reference).norm(dim=-1) <= _MAX_ERRORS[spec.dtype] * reference.norm(dim=-1)).all())
        for result, reference in zip(bench.rows(), expected, strict=True)
    )


def rows_are_independent(backend: AttentionBackend, spec: DecoderSpec) -> bool:
    """Whether a row has the same bits in runs of every length, and the same bits alone as in a step with other sequences, tried at several
    numbers of pages."""
    bench = _Bench(backend, spec)
    return all(bench.cuts_agree(pages, counts) for pages, counts in bench.CUTS) and bench.company_agrees()


class _Bench:
    """Random rows, and a cache of random keys and values, for trying out a backend."""

    LENGTHS = (1, 1, 2, 3, 3, 4, 5, 6, 7, 9, 11, 12, 13, 16, 17, 20, 24, 31, 32, 33, 40)
    """Number of pages that each of the single rows sees."""

    CUTS: tuple[tuple[int, Sequence[int]], ...] = (
        *((pages, range(1, PAGE_ROWS)) for pages in (1, 3, 16)),
        *((pages, (1, 5, PAGE_ROWS - 1)) for pages in (2, 6, 40)),
    )
    """Pairs: the number of pages that a run sees, and the numbers of rows that are tried as a run by itself. A library chooses its kernel
    by the sizes of a product: so every number of rows is tried at 1, 3 and 16 pages, and a few at 2, 6 and 40."""

    FULL_RUN_PAGES = (1, 2, 3, 40)
    """Numbers of pages that a run of PAGE_ROWS rows sees in `numbers_agree`."""

    def __init__(self, backend: AttentionBackend, spec: DecoderSpec, dtype: torch.dtype | None = None) -> None:
        """dtype: the type to compute in; None: `spec.dtype`. All numbers are first rounded to `spec.dtype`."""
        self._backend = backend
        # One layer is enough, and no item is looked at.
        self._spec = DecoderSpec(
            1, spec.query_heads, spec.kv_heads, spec.head_size, 1, spec.context, dtype or spec.dtype, device=spec.device
        )
        self._cache = KVCache(self._spec, max(self.LENGTHS) + len(self.LENGTHS))
        generator = torch.Generator().manual_seed(0)
        shapes = self._cache.layer(0).shape, (PAGE_ROWS, spec.query_heads, spec.head_size), (PAGE_ROWS, 2 * spec.kv_heads, spec.head_size)
        pages, *rows = (torch.randn(shape, generator=generator).to(spec.dtype) for shape in shapes)
        self._cache.layer(0).copy_(pages)
        self._queries, self._stored = (values.to(spec.device, self._spec.dtype) for values in rows)

    def rows(self) -> Iterator[torch.Tensor]:
        """The backend's results, [rows, query_heads, head_size] each: runs of a whole page, then all single rows."""
        for pages in self.FULL_RUN_PAGES:
            yield self._attend_full_run(pages).view(-1, self._spec.query_heads, self._spec.head_size)
        runs = self._singles()
        yield self._attend(runs, range(len(runs))).view(-1, self._spec.query_heads, self._spec.head_size)

    def cuts_agree(self, pages: int, counts: Sequence[int]) -> bool:
        """Whether the first and the last rows of a page have the same bits in a run by themselves as in a run of the whole page, for each
        number of rows in `counts`."""
        start, reference = (pages - 1) * PAGE_ROWS, self._attend_full_run(pages)
        for count in counts:
            for at in (0, PAGE_ROWS - count):
                part = self._attend([PlannedRun(0, count, start + at, tuple(range(pages)))], range(at, at + count))
                if not torch.equal(part, reference[at : at + count]):
                    return False
        return True

    def company_agrees(self) -> bool:
        """Whether single rows of several sequences have the same bits together in one step as alone."""
        runs = self._singles()
        together = self._attend(runs, range(len(runs)))
        references = [self._attend([PlannedRun(0, 1, run.start, run.pages)], range(at, at + 1)) for at, run in enumerate(runs)]
        return torch.equal(torch.cat(references), together)

    def _attend_full_run(self, pages: int) -> torch.Tensor:
        """The results of a run of PAGE_ROWS rows that fills the last of `pages` pages."""
        return self._attend([PlannedRun(0, PAGE_ROWS, (pages - 1) * PAGE_ROWS, tuple(range(pages)))], range(PAGE_ROWS))

    def _singles(self) -> list[PlannedRun]:
        """Runs of one row each, of several sequences, which share all pages but their last ones."""
        return [
            PlannedRun(at, 1, (pages - 1) * PAGE_ROWS + at, (*range(pages - 1), max(self.LENGTHS) + at))
            for at, pages in enumerate(self.LENGTHS)
        ]

    def _attend(self, runs: Sequence[PlannedRun], rows: range) -> torch.Tensor:
        span = slice(rows.start, rows.stop)
        return attend(self._backend, self._cache, self._spec, runs, self._queries[span], self._stored[span])


def attend(
    backend: AttentionBackend,
    cache: KVCache,
    spec: DecoderSpec,
    runs: Sequence[PlannedRun],
    queries: torch.Tensor,
    stored: torch.Tensor,
    layer: int = 0,
) -> torch.Tensor:
    """The attention of one layer by itself, for trials and tests. stored: keys and values of the rows. Shapes are as in `Attention`."""
    slots = [slot for run in runs for slot in range(run.start, run.start + run.count)]
    pages = [run.pages[-1] for run in runs for _ in range(run.count)]
    no_rows = torch.zeros(0, dtype=torch.int64, device=spec.device)
    plan = StepPlan(
        rows=StepRows(no_rows, no_rows),
        pages=torch.tensor(pages, dtype=torch.int64, device=spec.device),
        places=torch.tensor(slots, dtype=torch.int64, device=spec.device) % PAGE_ROWS,
        runs=tuple(runs),
        draw_rows=no_rows,
    )
    return backend.bind(cache, spec, plan)(layer, queries, stored)
