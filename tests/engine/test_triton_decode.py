"""The kernel for accelerators gives the results of SDPA, whatever runs beside a row, and a kernel that does not is not used.

If there is a GPU, the kernel is compiled and runs there; elsewhere Triton's interpreter computes, in NumPy."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from helpers import lengths
from omnistage.engine import attention, paged_kernel
from omnistage.engine.adapter import DecoderSpec
from omnistage.engine.attention import RowAttention, SdpaAttention, TritonAttention, attend, choose_backend, fault_of, numbers_agree
from omnistage.engine.memory import PAGE_ROWS, KVCache, pages_for
from omnistage.engine.plan import PlannedRun

IS_THERE = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if IS_THERE else "cpu")
NEAR = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}
PAGES = 160

pytestmark = pytest.mark.skipif(not (IS_THERE or knobs.runtime.interpret), reason="a build of torch and a driver for GPUs, but no GPU")


@pytest.fixture(autouse=True)
def multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter keeps bfloat16 as integers of the same bits, and would multiply those."""
    multiply = InterpreterBuilder.create_dot

    def wide(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object) -> TensorHandle:
        return multiply(self, _floats(a), _floats(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", wide)


def _floats(handle: TensorHandle) -> TensorHandle:
    if handle.data.dtype != np.uint16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


class Anywhere(TritonAttention):
    """The kernel, viable also if only the interpreter is there."""

    def is_viable(self, spec: DecoderSpec) -> bool:
        return True


def sizes(query_heads: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> DecoderSpec:
    return DecoderSpec(2, query_heads, kv_heads, head_size, 500, 4096, dtype, device=DEVICE)


def some_runs(source: random.Random, count: int) -> list[PlannedRun]:
    """Runs of sequences of all lengths, also of one row and of whole pages, in pages anywhere."""
    free = source.sample(range(PAGES), PAGES)
    runs, first = list[PlannedRun](), 0
    for number in range(count):
        end = source.choice([1, 2, PAGE_ROWS, PAGE_ROWS + 1, 2 * PAGE_ROWS, source.randint(1, 4 * PAGE_ROWS)])
        most = (end - 1) % PAGE_ROWS + 1
        rows = 1 if number % 2 else source.choice([1, most, source.randint(1, most)])
        runs.append(PlannedRun(first, rows, end - rows, tuple(free.pop() for _ in range(pages_for(end)))))
        first += rows
    return runs


class RandomRuns:
    """Random numbers for some runs, in layer 1. Values that no run may read are NaN."""

    def __init__(self, spec: DecoderSpec, runs: list[PlannedRun], seed: int) -> None:
        self.spec, self.runs = spec, runs
        generator = torch.Generator().manual_seed(seed)
        rows = sum(run.count for run in runs) + 3  # Three of these rows are padding.
        self.held = torch.randn(PAGES, 2 * spec.kv_heads, PAGE_ROWS, spec.head_size, generator=generator).to(spec.dtype)
        self.queries = torch.randn(rows, spec.query_heads, spec.head_size, generator=generator).to(spec.dtype).to(DEVICE)
        self.stored = torch.randn(rows, 2 * spec.kv_heads, spec.head_size, generator=generator).to(spec.dtype).to(DEVICE)

    def attended(self, runs: list[PlannedRun] | None = None) -> torch.Tensor:
        """The results of all runs, or of some of them. [rows, query_heads, head_size]"""
        asked = self.runs if runs is None else runs
        cache = KVCache(self.spec, PAGES, poison=True)
        for run in asked:
            for number, page in enumerate(run.pages):
                before = max(0, min(PAGE_ROWS, run.start - number * PAGE_ROWS))
                cache.layer(1)[page, :, :before] = self.held[page, :, :before].to(DEVICE)
        return self._result(Anywhere(), cache, self.spec, asked)

    def expected(self) -> torch.Tensor:
        """The results of SDPA for the same numbers in float32."""
        spec = replace(self.spec, dtype=torch.float32)
        cache = KVCache(spec, PAGES)
        cache.layer(1).copy_(self.held)
        return self._result(SdpaAttention(), cache, spec, self.runs)

    def _result(self, backend: attention.AttentionBackend, cache: KVCache, spec: DecoderSpec, asked: list[PlannedRun]) -> torch.Tensor:
        rows, runs = list[int](), list[PlannedRun]()
        for run in asked:
            runs.append(replace(run, first=len(rows)))
            rows += range(run.first, run.first + run.count)
        rows += [len(self.queries) - 1] * 3
        result = attend(backend, cache, spec, runs, self.queries[rows].to(spec.dtype), self.stored[rows].to(spec.dtype), layer=1)
        return result.view(len(rows), spec.query_heads, spec.head_size)


@pytest.mark.parametrize(
    ("heads", "dtype", "count"),
    [
        ((1, 1, 64), torch.float32, 33),
        ((7, 1, 128), torch.bfloat16, 33),
        ((7, 1, 64), torch.float32, 2),
        ((4, 1, 128), torch.float16, 5),
        ((8, 2, 64), torch.bfloat16, 1),
        ((3, 1, 80), torch.bfloat16, 5),
        ((40, 1, 16), torch.float32, 2),
    ],
    ids=str,
)
def test_rows_are_those_of_sdpa(heads: tuple[int, int, int], dtype: torch.dtype, count: int, seed: int) -> None:
    """Heads of any shape, in any pages, beside values that mean nothing."""
    bench = RandomRuns(sizes(*heads, dtype), some_runs(random.Random(seed), count), seed)
    result, expected = bench.attended(), bench.expected()
    assert not result[-3:].any()
    differences = (result[:-3].float() - expected[:-3]).norm(dim=-1) / expected[:-3].norm(dim=-1)
    assert differences.max() < NEAR[dtype]


@pytest.mark.parametrize(("heads", "dtype"), [((7, 1, 64), torch.bfloat16), ((4, 2, 80), torch.float32)], ids=str)
def test_a_row_has_the_same_bits_alone_in_company_and_in_a_run(heads: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
    source = random.Random(seed)
    bench = RandomRuns(sizes(*heads, dtype), some_runs(source, 6), seed)
    together = bench.attended()
    for run in bench.runs:
        assert torch.equal(bench.attended([run])[: run.count], together[run.first : run.first + run.count])
    some = source.sample(bench.runs, 3)
    expected = torch.cat([together[run.first : run.first + run.count] for run in some])
    assert torch.equal(bench.attended(some)[:-3], expected)


def test_without_rows_nothing_is_attended(seed: int) -> None:
    """And a run without any rows changes nothing for the others."""
    runs = some_runs(random.Random(seed), 2)
    bench = RandomRuns(sizes(3, 1, 64, torch.float32), runs, seed)
    nothing = [PlannedRun(0, 0, 0, (0,)), PlannedRun(0, 0, 0, (0,))]
    assert not bench.attended(nothing).any()
    assert torch.equal(bench.attended([nothing[0], *runs, nothing[1]]), bench.attended())


# Which is chosen -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a few pages are tried: the interpreter takes milliseconds for each."""
    monkeypatch.setattr(attention._Bench, "LENGTHS", (1, 1, 2, 3))
    monkeypatch.setattr(attention._Bench, "CUTS", ((1, (1, 5, PAGE_ROWS - 1)), (3, (5,))))
    monkeypatch.setattr(attention._Bench, "FULL_RUN_PAGES", (1, 3))


@pytest.mark.parametrize("how", ["brief", pytest.param("whole", marks=lengths.LONG)])
def test_where_its_claims_hold_it_is_chosen(how: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "brief":
        request.getfixturevalue("brief")
    monkeypatch.setattr(attention, "ATTENTION", (Anywhere, SdpaAttention, RowAttention))
    choice = choose_backend(sizes(1, 1, 16, torch.bfloat16))
    assert isinstance(choice.backend, Anywhere)
    assert choice.reason == "triton over pages: rows had equal bits in blocks, in batches and alone at load"


@pytest.mark.usefixtures("brief")
def test_its_numbers_are_tried_in_every_dtype(dtype: torch.dtype) -> None:
    assert numbers_agree(Anywhere(), sizes(7, 1, 32, dtype))


MISTAKES = {
    "a row does not see itself": ("slot[None, :] <= (start + row)[:, None]", "slot[None, :] < (start + row)[:, None]"),
    "a row sees the next one": ("slot[None, :] <= (start + row)[:, None]", "slot[None, :] <= (start + row + 1)[:, None]"),
    "the last page is left out": ("range(start // PAGE + 1)", "range(tl.maximum(start // PAGE, 1))"),
    "scaled twice": ("scores = tl.dot(query, tl.trans(keys), ", "scores = 0.125 * tl.dot(query, tl.trans(keys), "),
    "sums are not scaled again": ("values, sums * decay[:, None]", "values, sums"),
    "heads in the wrong order": ("query_index // GROUP, tl", "query_index % PAGE, tl"),
}


def _mistaken(old: str, new: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The kernel with one place of its text replaced. Triton reads it from a file."""
    text = Path(paged_kernel.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (folder / "mistaken.py").write_text(text.replace(old, new), encoding="utf-8")
    found = importlib.util.spec_from_file_location("mistaken", folder / "mistaken.py")
    assert found is not None and found.loader is not None
    made = importlib.util.module_from_spec(found)
    patch.setitem(sys.modules, "mistaken", made)
    found.loader.exec_module(made)
    patch.setattr(paged_kernel, "attend", made.attend)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.usefixtures("brief")
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning")
def test_a_kernel_with_wrong_numbers_is_found_out(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _mistaken(*MISTAKES[mistake], tmp_path, monkeypatch)
    assert fault_of(Anywhere(), sizes(2, 1, 64, torch.bfloat16)) == "its numbers were not those of sdpa in float32"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("slot[None, :] <= (start", "slot[None, :] < (start", "its numbers were not those of sdpa in float32 at load; "),
        ("(sums / total[:, None])", "(sums / total[:, None] * (1 + 1e-6 * (first % 2)))", "a row depended on its neighbours at load; "),
        ("    row, column, place", "    tl.static_assert(GROUP > 9)\n    row, column, place", "it failed with "),
    ],
    ids=["numbers", "neighbours", "not made"],
)
@pytest.mark.usefixtures("brief")
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")
def test_a_kernel_that_fails_gives_way_and_the_settings_say_why(
    old: str, new: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _mistaken(old, new, tmp_path, monkeypatch)
    monkeypatch.setattr(attention, "ATTENTION", (Anywhere, RowAttention))
    choice = choose_backend(sizes(2, 1, 16, torch.float32))
    assert isinstance(choice.backend, RowAttention)
    assert f"not triton over pages: {told}" in choice.reason


COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from omnistage.engine import paged_kernel

sizes = dict(GROUP=7, KV_HEADS=4, SIZE=80, WIDTH=128, PAGE=32, TILE=paged_kernel.TILE, FIELDS=5)
for target, numbers in ((80, "*bf16"), (90, "*bf16"), (90, "*fp32")):
    types = dict(queries=numbers, pages=numbers, told="*i32", result=numbers) | dict.fromkeys(sizes, "constexpr")
    source = ASTSource(paged_kernel._attend, types, {(list(types).index(name),): size for name, size in sizes.items()})
    text = triton.compile(source, GPUTarget("cuda", target, 32), paged_kernel.OPTIONS).asm["ptx"]
    print("mma.sync" in text, "wgmma" in text, "tf32" in text)
"""


@lengths.long_form(unkept="The kernel compiles for GPUs that are not here, and uses their matrix units for bfloat16 alone.")
def test_it_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """bfloat16 uses the matrix units, with the one instruction that takes few rows; float32 does not, because the matrix units would
    shorten its numbers."""
    others = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILES], env={**others, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.splitlines() == ["True False False", "True False False", "False False False"], done.stderr


def test_processors_never_import_it() -> None:
    program = (
        "import sys, torch\n"
        "from omnistage.engine.adapter import DecoderSpec\n"
        "from omnistage.engine.attention import choose_backend\n"
        "print(choose_backend(DecoderSpec(1, 1, 1, 16, 9, 64, torch.float32)).backend.name, 'triton' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split()[-1] == "False"
