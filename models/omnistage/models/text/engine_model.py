"""The shared part of models on the engine: reading weights, starting, reporting settings, and ending; and the conversion of tensors to the
arrays of pieces, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import torch

from omnistage.engine.adapter import Head
from omnistage.engine.attention import choose_backend
from omnistage.engine.decoder import EMBEDDING, LM_HEAD, PackedDecoder
from omnistage.engine.engine import Engine
from omnistage.engine.memory import PAGE_ROWS, page_bytes
from omnistage.engine.plan import NOBODY
from omnistage.engine.results import fixed_results
from omnistage.engine.scheduler import SchedulerLimits
from omnistage.models.checkpoint.decoder import expert_of_all
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.checkpoint.revision import compute_on_thread, digests_of_files, revision
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.devices import dtype_of, hardware
from omnistage.models.interface import Activity, Array, Batches, Load, ModelInfo
from omnistage.models.memory import memory_texts
from omnistage.models.options import LoadOptions, with_resumed
from omnistage.models.ranks.team import Team
from omnistage.models.reports import LoadError
from omnistage.models.worker import Worker

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Computes logits [rows, vocabulary] from [rows, hidden]."""

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class EngineModel:
    """A model that runs on an engine; implements `Model` except `warm_up`."""

    def __init__(self, engine: Engine, info: ModelInfo, workers: Sequence[Worker] = (), team: Team | None = None) -> None:
        """workers: threads in addition to the engine's. team: the other ranks of its decoder; None: there are none. The model closes the
        engine, the workers and the team."""
        self.engine, self.info, self._workers, self._team = engine, info, tuple(workers), team
        self.threads: Sequence[Activity] = (engine.activity, *(worker.activity for worker in workers))

    def load(self) -> Load:
        stats = self.engine.stats()
        return Load(
            queued=stats.waiting,
            kv_pages_used=stats.pages_used,
            kv_pages_total=stats.pages_total,
            preemptions=stats.preemptions,
            batches=Batches(stats.steps, stats.stepped),
        )

    async def close(self) -> None:
        await self.engine.close()
        for worker in self._workers:
            await worker.close()
        if self._team is not None:
            await asyncio.to_thread(self._team.close)


# How a model starts ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine with the decoder of a checkpoint, and facts for the model's info. files: see `digests_of_files`. dtype: name of the
    type of computing. results: this machine's results for a fixed sequence, see `fixed_results`. settings: the chosen settings with their
    reasons."""

    engine: Engine
    folder: Path
    files: bytes
    options: LoadOptions
    dtype: str
    results: Sequence[torch.Tensor]
    settings: Mapping[str, str]

    @classmethod
    def of(
        cls,
        decoder: PackedDecoder,
        head: Callable[[Logits], Head],
        folder: Path,
        options: LoadOptions,
        *,
        limits: SchedulerLimits,
        kv_bytes: int,
        poison: bool = False,
        team: Team | None = None,
    ) -> Self:
        """Start the engine. head: makes the head from the function that computes logits. kv_bytes: bytes of keys and values. poison: see
        `Engine`. team: the other ranks of the decoder; `kv_bytes` then counts for each rank."""
        followers, logits = (NOBODY, decoder.logits) if team is None else (team, team.logits(decoder.logits))
        attention = choose_backend(decoder.spec)
        with ThreadPoolExecutor(1) as pool:  # At the same time: both take long, and do not hold Python's lock.
            files = pool.submit(digests_of_files, folder)
            results = compute_on_thread(partial(fixed_results, decoder, logits, attention.backend, followers), options.threads)
        engine = Engine(
            decoder,
            head(logits),
            pages=kv_bytes // page_bytes(decoder.spec),
            limits=limits,
            kept_pages=None if options.keeps_prompts else 0,
            poison=poison,
            attention=attention,
            followers=followers,
        )
        dtype = str(decoder.spec.dtype).removeprefix("torch.")
        option_values: dict[str, object] = {"dtype": dtype, "max_batch_size": limits.max_sequences, "max_batch_tokens": limits.max_rows}
        if team is not None:
            option_values["tensor_parallel_size"] = options.tensor_parallel_size
        option_values["enable_cache"] = options.keeps_prompts
        settings = {
            **{name: options.describe(name, value) for name, value in option_values.items()},
            **memory_texts(folder),
            "products": decoder.products,
            "attention": engine.attention.reason,
        }
        return cls(engine, folder, files.result(), options, dtype, results, settings)

    def revision(self, code: str, *, results: Iterable[torch.Tensor] = (), settings: str = "") -> str:
        """The revision of the model, see `revision.revision`. code: number of the family's code. results: results of the model's other
        parts for fixed inputs. settings: other settings that change the output."""
        ranks = self.options.tensor_parallel_size
        return revision(
            self.folder,
            code,
            dtype=self.dtype,
            device=hardware(self.options.device),
            threads=self.options.threads,
            results=[*self.results, *results],
            settings=f"{settings}, {ranks} ranks" if ranks > 1 else settings,
            files=self.files,
        )


def choose_dtype(options: LoadOptions) -> torch.dtype:
    """The type that a model computes in: the option, or for "auto" the type that the device multiplies fast. Raises LoadError."""
    name = dtype_of(options.device) if options.dtype == "auto" else options.dtype
    if name not in _DTYPES:
        raise LoadError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def limits_of(options: LoadOptions, rows: int = 0) -> SchedulerLimits:
    """The limits of the engine. rows: largest number of rows of a step if the user sets none; 0: the usual number. Raises LoadError. All
    sessions may wait at once, including the sessions that continue here after another replica was lost."""
    rows = options.max_batch_tokens or rows
    limits = SchedulerLimits(max_sequences=options.max_batch_size or options.sessions, max_waiting=with_resumed(options.sessions))
    if not rows:
        return limits
    if rows < PAGE_ROWS:
        raise LoadError(f"max_batch_tokens {rows}: a piece of a prompt alone has {PAGE_ROWS}")
    return replace(limits, max_rows=rows)


def decoder_weights(
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    *,
    prefix: str,
    head: str = "",
    tied: bool = False,
    biased: Collection[str] = (),
) -> Callable[[str], torch.Tensor | None]:
    """A function that returns a decoder's weights from a checkpoint, by the decoder's names; None if there is no such weight. prefix:
    beginning of their names in the checkpoint. head: whole name of the weight of the logits; empty: the logits use the embedding. tied: if
    the checkpoint lacks `head`, the logits use the embedding; a `head` that is there is used, as in Transformers. biased: names of the
    products that have a bias; other biases are not read, as in Transformers. The embedding is mapped without a copy if it is stored in the
    right type. The experts of a layer may be stored one by one or together. The function raises BadCheckpoint for a missing head or
    bias."""

    def weight(name: str) -> torch.Tensor | None:
        if name == LM_HEAD:
            tensor = weights.read(head) if head else None
            if head and tensor is None and not tied:
                raise BadCheckpoint(f"{weights.directory} lacks the weight {head}")
        elif name.endswith(".bias"):
            product = name.split(".")[-2]
            tensor = weights.need(prefix + name) if product in biased else None
        else:
            tensor = weights.mapped(prefix + name) if name == EMBEDDING else weights.read(prefix + name)
            tensor = expert_of_all(weights, prefix + name) if tensor is None else tensor
        return None if tensor is None else tensor.to(device, dtype)

    return weight


def array_of(tensor: torch.Tensor) -> Array:
    """A CPU tensor as an array, which shares its memory if possible. NumPy has no bfloat16, so the bits become uint16, as in ports of that
    type."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def tensor_of(array: Array) -> torch.Tensor:
    """A copy of a port's rows as a tensor on the CPU; uint16 becomes bfloat16."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
