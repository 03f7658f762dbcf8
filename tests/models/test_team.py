"""A decoder over several processes: its rows and tokens are those of one, whatever is beside them; and whoever of them ends, all do."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import lengths
from helpers.engines import items, read
from helpers.parts import CONFIG, EXPERTS, MIX, MIXED, PLAN, RANDOM_READER, random_weights, read_random, read_toy
from helpers.parts import READER as TOY_READER
from helpers.parts import requests as toy_requests
from helpers.processes import few_descriptors, open_files
from helpers.waiting import until
from omnistage.engine.adapter import TokenHead
from omnistage.engine.devices import ONE_RANK, Distributed
from omnistage.engine.engine import Engine
from omnistage.engine.plan import StepPlan
from omnistage.engine.request import EngineClosed, Given, Prompt, SequenceEvent, SequenceRequest
from omnistage.engine.results import fixed_results
from omnistage.engine.types import Item, Sampling
from omnistage.models.checkpoint.decoder import config_of_part, weights_of_part
from omnistage.models.options import LoadOptions
from omnistage.models.ranks.team import ReadPart, Team, options_of, receive, send
from omnistage.models.reports import LoadError

DRAWN = Sampling(temperature=1, top_p=0.95, repetition_penalty=1.05)
END_S = 20.0
INTERFACE = "GLOO_SOCKET_IFNAME"
COMPANIES = {f"{size} {dtype}": (size, dtype) for size in (2, 4) for dtype in ("float32", "bfloat16")}
TEAMS = {"two": (2, False), "four": (4, False), "two, tied": (2, True), "four, tied": (4, True)}
LOSSES = {f"{which} {state}": (which, state == "at work") for which in (0, 2) for state in ("at rest", "at work")}


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Other ranks find the reader; nothing of theirs stays behind."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.iterdir())


def options(size: int, seed: int, dtype: str = "float32", **family: object) -> LoadOptions:
    return LoadOptions(dtype=dtype, tensor_parallel_size=size, family={"seed": seed % 1000, **family})


@contextmanager
def team_of(settings: LoadOptions, reader: str = RANDOM_READER) -> Iterator[Team]:
    team = Team(reader, Path(), settings)
    processes = team.processes
    try:
        yield team
    finally:
        team.close()
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def alone(settings: LoadOptions) -> tuple[Engine, list[torch.Tensor]]:
    """An engine of one rank, and what its decoder makes of the fixed sequence."""
    decoder = read_random(Path(), replace(settings, tensor_parallel_size=1), ONE_RANK)
    engine = Engine(decoder, TokenHead(decoder.logits), pages=64, poison=True)
    return engine, fixed_results(decoder, decoder.logits, engine.attention.backend)


@contextmanager
def engine_of(settings: LoadOptions, pages: int = 64, toy: bool = False, **options: Any) -> Iterator[tuple[Engine, Team]]:
    """An engine of several ranks."""
    with team_of(settings, TOY_READER if toy else RANDOM_READER) as team:
        decoder = (read_toy if toy else read_random)(Path(), settings, team.group)
        team.connect(torch.device("cpu"))
        yield Engine(decoder, TokenHead(team.logits(decoder.logits)), pages=pages, poison=True, followers=team, **options), team


def requests(seed: int, count: int = 6, tokens: int = 40, sampling: Sampling | None = None) -> list[SequenceRequest]:
    """Prompts of one row to several pages, some with vectors in the place of their tokens; all begin alike."""
    source = random.Random(seed)
    alike = [source.randrange(CONFIG.vocab_size) for _ in range(70)]
    asked = []
    for number in range(count):
        ids = alike[: source.choice((1, 40, 70))] + [source.randrange(CONFIG.vocab_size) for _ in range(source.choice((1, 9, 33)))]
        prompt = Prompt.of_tokens(ids)
        if number % 2:
            rows = torch.randn(3, CONFIG.hidden_size, generator=torch.Generator().manual_seed(number))
            prompt = replace(prompt, given=(Given(len(ids) // 2, rows[: len(ids) - len(ids) // 2], bytes([number])),))
        asked.append(SequenceRequest(prompt, seed=seed + number, max_items=tokens, sampling=sampling or Sampling(), taps_from=0))
    return asked


def long(seed: int) -> SequenceRequest:
    """Two pages, and almost three of answer: with one more like it there is no room for that in eight, also where the machine is so busy
    that the other one comes many steps later."""
    prompt = Prompt.of_tokens([random.Random(seed).randrange(CONFIG.vocab_size) for _ in range(60)])
    return SequenceRequest(prompt, seed=seed, max_items=80, sampling=DRAWN, taps_from=0)


async def answered(engine: Engine, asked: list[SequenceRequest]) -> list[list[SequenceEvent]]:
    return list(await asyncio.gather(*(read(engine.submit(each)) for each in asked)))


def taps(events: list[SequenceEvent]) -> torch.Tensor:
    return torch.cat([event.taps.rows for event in events if event.taps is not None])


def tokens(answers: list[list[SequenceEvent]]) -> list[list[Item]]:
    return [items(events) for events in answers]


@lengths.one_or_all("case", TEAMS)
async def test_several_ranks_say_what_one_says(case: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the fixed sequence that tells what a machine computes; and only this machine can reach them."""
    monkeypatch.delenv(INTERFACE, raising=False)  # An earlier test may have set it.
    size, tied = TEAMS[lengths.draw(case, TEAMS, seed)]
    settings, asked = options(size, seed, tied=tied), requests(seed)
    one, fixed = alone(settings)
    expected = await answered(one, asked)
    await one.close()
    before = listened([os.getpid()])
    with team_of(settings) as team:
        decoder = read_random(Path(), settings, team.group)
        team.connect(torch.device("cpu"))
        addresses = listened([os.getpid(), *team.processes]) - before
        assert len(addresses) >= 2 and all(address.startswith("127.") for address in addresses), addresses
        # Where the name of the machine is one of the loopback, they would be there by chance.
        assert os.environ[INTERFACE] == "lo" and all(f"{INTERFACE}=lo" in variables(process) for process in team.processes)
        logits = team.logits(decoder.logits)
        results = fixed_results(decoder, logits, one.attention.backend, team)
        engine = Engine(decoder, TokenHead(logits), pages=64, poison=True, followers=team)
        found = await answered(engine, asked)
        await engine.close()
    assert tokens(found) == tokens(expected)
    torch.testing.assert_close([*map(taps, found), *results], [*map(taps, expected), *fixed], rtol=1e-3, atol=1e-3)


@lengths.long_form(
    "models/test_team.py::test_several_ranks_say_what_one_says",
    "engine/test_exactness.py::test_logits_are_equal_alone_and_in_a_ragged_batch_that_others_join_and_leave",
    unkept="the bits of several ranks do not depend on company either",
)
@lengths.one_or_all("case", COMPANIES)
async def test_what_a_row_becomes_does_not_depend_on_the_others(case: str, seed: int) -> None:
    """Bit for bit: alone, beside others, with known beginnings, and where there is so little room that they make way for each other."""
    size, dtype = COMPANIES[lengths.draw(case, COMPANIES, seed)]
    asked = [*requests(seed, 2, tokens=10, sampling=DRAWN), *(long(seed + n) for n in range(2))]
    with engine_of(options(size, seed, dtype), pages=8) as (engine, _):
        together = await answered(engine, asked)
        assert engine.stats().preemptions
        for each, before in zip(asked, together, strict=True):
            (alone,) = await answered(engine, [each])
            assert items(alone) == items(before)
            assert torch.equal(taps(alone), taps(before))
        await engine.close()


@lengths.long_form(
    "models/test_team.py::test_several_ranks_say_what_one_says",
    "models/test_team.py::test_parts_of_other_layers_are_the_whole",
    unkept="several ranks compute a mixture of experts",
)
async def test_ranks_of_other_parts_say_what_one_says_and_a_row_does_not_depend_on_the_others(seed: int) -> None:
    """Several ranks say what one rank says, and give the same bits alone and where
    requests make way for each other. The requests that are compared with one rank are always the same: a row between two experts would go
    to the other one now and then."""
    settings = LoadOptions(dtype="float32", tensor_parallel_size=2, family={"seed": 5})
    fixed, asked = toy_requests(MIX, 5, (1, 40), 20), toy_requests(MIX, seed, (61, 60), 80, DRAWN)
    decoder = MIX.decoder(5)
    one = Engine(decoder, TokenHead(decoder.logits), pages=64, poison=True)
    expected = await answered(one, fixed)
    await one.close()
    with engine_of(settings, 8, toy=True, kept_pages=0) as (engine, _):
        found, beside = await answered(engine, fixed), await answered(engine, asked)
        assert engine.stats().preemptions
        (alone,) = await answered(engine, asked[:1])
        await engine.close()
    assert items(alone) == items(beside[0]) and torch.equal(taps(alone), taps(beside[0]))
    assert tokens(found) == tokens(expected)
    torch.testing.assert_close([*map(taps, found)], [*map(taps, expected)], rtol=1e-3, atol=1e-3)


def test_parts_of_other_layers_are_the_whole(seed: int) -> None:
    """The shared expert is cut, the others are not; routers, norms and positions are whole."""
    whole = MIX.weights(seed)
    parts = [weights_of_part(whole.get, MIX.plan, Distributed(rank, 2)) for rank in range(2)]
    for weight, value in whole.items():
        mine = [found for part in parts if (found := part(weight)) is not None]
        if any(part in weight for part in ("norm", ".gate.", "shared_expert_gate", "embed_", ".experts.")):
            assert all(torch.equal(part, value) for part in mine) and len(mine) == 2
        else:
            assert torch.equal(torch.cat(mine, 1 if any(part in weight for part in ("o_proj", "down_proj")) else 0), value)
            assert [part.numel() for part in mine] == [value.numel() // 2] * 2


def test_parts_are_the_whole(seed: int) -> None:
    """As the plan says: columns side by side, rows added up, and a bias once."""
    whole = random_weights(seed % 1000, torch.float32)
    parts = [weights_of_part(whole.get, PLAN, Distributed(rank, 4)) for rank in range(4)]
    for name, weight in whole.items():
        module = name.rpartition(".")[0]
        style = next((style for pattern, style in PLAN.items() if module.endswith(pattern.rpartition("*.")[2])), "")
        mine = [part(name) for part in parts]
        there = [part for part in mine if part is not None]
        if style == "rowwise" and weight.ndim == 1:
            assert mine[0] is weight and mine[1:] == [None] * 3
        elif style:
            assert torch.equal(torch.cat(there, 1 if style == "rowwise" else 0), weight) and len(there) == 4
        else:
            assert all(torch.equal(part, weight) for part in there) and len(there) == 4


def test_a_part_holds_no_more_than_itself(seed: int) -> None:
    """Where products keep the weight that they are given, a view of it would keep all of it."""
    whole = random_weights(seed % 1000, torch.float32)
    part = weights_of_part(whole.get, PLAN, Distributed(1, 4))
    for name in ("lm_head.weight", "layers.0.self_attn.o_proj.weight"):
        found = part(name)
        assert found is not None and found.untyped_storage().nbytes() == found.nbytes == whole[name].nbytes // 4


@pytest.mark.parametrize("size", [0, 3, 8, 64])
def test_a_size_that_does_not_divide_is_refused(size: int) -> None:
    told = "does not divide 8 query heads, 4 heads of keys.*it can be 1 or 2 or 4" if size else "there is at least one rank"
    with pytest.raises(LoadError, match=f"tensor_parallel_size {size}: {told}"):
        config_of_part(CONFIG, size)


@pytest.mark.parametrize(("name", "way"), [("mlp", "moe_tp_experts"), ("mlp.gate_up_proj", "packed_colwise")])
def test_a_plan_that_cuts_in_another_way_is_refused(name: str, way: str) -> None:
    with pytest.raises(LoadError, match=rf"the plan cuts layers\.\*\.{name} '{way}', which is not known here"):
        weights_of_part(lambda name: None, {f"layers.*.{name}": way}, ONE_RANK)


def test_experts_that_cannot_be_cut_are_told() -> None:
    """The shared one: of the others a rank has some, whole, and another one more."""
    told = "does not divide .* 44 columns of the shared expert, 218 tokens of this model; it can be 1 or 2"
    with pytest.raises(LoadError, match=f"tensor_parallel_size 3: {told}"):
        config_of_part(MIXED, 3, EXPERTS.divided_sizes)
    ranks = [EXPERTS.of_rank(Distributed(rank, 3)) for rank in range(3)]
    assert [len(experts) for experts in ranks] == [3, 2, 2] and sorted(expert for experts in ranks for expert in experts) == list(range(7))


def test_ranks_of_gpus_have_one_each() -> None:
    several = LoadOptions(device="cuda", tensor_parallel_size=2)
    assert [options_of(several, rank).device for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert options_of(replace(several, tensor_parallel_size=1), 0).device == "cuda"
    with pytest.raises(LoadError, match="takes the first GPUs, device must be cuda, not cuda:1"):
        options_of(replace(several, device="cuda:1"), 0)


def connected(settings: LoadOptions, reader: str = RANDOM_READER) -> None:
    team = Team(reader, Path("no such folder"), settings)
    try:
        team.connect(torch.device("cpu"))
    finally:
        team.close()


@lengths.long_form(
    "models/test_team.py::test_one_that_is_killed_as_it_loads_is_told_and_a_team_is_closed_once",
    unkept="an error of another rank as it loads is told in its words",
)
def test_what_another_rank_cannot_load_is_told(seed: int, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LoadError, match=r"^rank 1 of 2: KeyError: 'seed'"):
        connected(LoadOptions(dtype="float32", tensor_parallel_size=2))
    with pytest.raises(LoadError, match=r"^rank 1 ended with status 1; its standard error says why"):
        connected(options(2, seed), "helpers.parts:nobody")
    assert "nobody" in capfd.readouterr().err


def closed_at_once(ours: Connection, asked: ReadPart) -> None:
    """Nothing was asked yet."""


def refused_before_it_has_read(ours: Connection, asked: ReadPart) -> None:
    send([ours], asked)


def refused_as_it_cannot_read(ours: Connection, asked: ReadPart) -> None:
    send([ours], replace(asked, options=LoadOptions()))


def ended_before_it_has_heard(ours: Connection, asked: ReadPart) -> None:
    send([ours], asked)
    assert ours.poll(END_S * 3)


def ended_within_a_message(ours: Connection, asked: ReadPart) -> None:
    send([ours], asked)
    receive(ours)
    os.write(ours.fileno(), (1000).to_bytes(4, "big") + b"no more")


@lengths.long_form(unkept="another rank says nothing where the first one has gone")
@pytest.mark.parametrize(
    "ended", [closed_at_once, refused_before_it_has_read, refused_as_it_cannot_read, ended_before_it_has_heard, ended_within_a_message]
)
def test_another_rank_says_nothing_where_the_first_one_has_gone(ended: Callable[[Connection, ReadPart], None], seed: int) -> None:
    """Whatever it was about to do: the first one says why it ended."""
    settings = options(2, seed)
    first, other = socket.socketpair()
    command = [sys.executable, "-P", "-m", "omnistage.models.ranks.rank", str(other.fileno()), str(os.getpid())]
    with subprocess.Popen(command, pass_fds=(other.fileno(),), stderr=subprocess.PIPE, text=True) as rank:
        other.close()
        with Connection(first.detach()) as ours:
            ended(ours, ReadPart(RANDOM_READER, Path(), settings, 1, 2))
        assert rank.communicate(timeout=END_S * 3)[1] == ""


def test_one_that_is_killed_as_it_loads_is_told_and_a_team_is_closed_once(seed: int) -> None:
    """Whoever closes it again closes nothing: its descriptors may be another one's by then."""
    with team_of(options(2, seed)) as team:
        os.kill(team.processes[0], signal.SIGKILL)
        with pytest.raises(LoadError, match=r"^rank 1 ended with signal SIGKILL"):
            team.connect(torch.device("cpu"))
        team.close()
        others = [os.pipe() for _ in range(8)]
    for end in sum(others, ()):
        os.close(end)


def test_without_descriptors_it_is_told_that_no_rank_can_be_started(seed: int) -> None:
    told = r"^tensor_parallel_size 4: the other ranks cannot be started: .*Too many open files"
    with few_descriptors(3), pytest.raises(LoadError, match=told):
        Team(RANDOM_READER, Path(), options(4, seed))


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors that ended a thread of this process."""
    told: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda each: told.append(f"{each.exc_type.__name__}: {each.exc_value}"))
    return told


@lengths.one_or_all("case", LOSSES)
async def test_where_one_is_killed_a_thread_of_the_first_one_ends(case: str, ended: list[str], seed: int) -> None:
    which, at_work = LOSSES[lengths.draw(case, LOSSES, seed)]
    with engine_of(options(4, seed)) as (engine, team):
        stream = engine.submit(requests(seed, 1, tokens=400)[0])
        await stream.take()
        if not at_work:
            await stream.aclose()
            await until(lambda: not engine.activity.busy)
        os.kill(team.processes[which], signal.SIGKILL)
        await until(lambda: any(f"RanksApart: rank {which + 1} ended with signal SIGKILL" in told for told in ended))
        with pytest.raises(EngineClosed):
            await read(stream) if at_work else await read(engine.submit(requests(seed, 1)[0]))
        await engine.close()


@lengths.long_form(
    "engine/test_engine.py::test_logits_that_are_not_finite_fail_their_sequence_only",
    unkept="an error of the first rank within a step ends all ranks",
)
async def test_a_request_that_fails_after_a_step_fails_alone_and_an_error_within_one_ends_all(
    ended: list[str], seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """After a step, what is drawn from is whole. Within one it is not tried again: the others are in the middle of it, and say nothing of
    it where this one does."""
    with engine_of(options(2, seed)) as (engine, team):
        good = requests(seed, 3)
        expected = tokens(await answered(engine, good))
        bias = replace(good[0], sampling=replace(DRAWN, logit_bias=dict.fromkeys(range(CONFIG.vocab_size), float("nan"))))
        spoilt = engine.submit(bias)
        others = await answered(engine, good)
        with pytest.raises(RuntimeError):
            await read(spoilt)
        assert tokens(others) == expected and not ended

        step, failing = team.step, threading.Event()

        @contextmanager
        def step_that_fails(plan: StepPlan) -> Iterator[None]:
            with step(plan):
                if failing.is_set():
                    raise MemoryError("no room")
                yield

        team.step = step_that_fails  # type: ignore[method-assign]
        stream = engine.submit(requests(seed, 1, tokens=400)[0])
        await stream.take()
        failing.set()
        with pytest.raises(EngineClosed, match="failed within a step of 2 ranks: MemoryError"):
            await read(stream)
        await until(lambda: bool(ended))
    assert "lost the others" not in capfd.readouterr().err


def listened(processes: list[int]) -> set[str]:
    """Addresses where processes take connections."""
    names = [name for process in processes for _, name in open_files(process)]
    own = {int(name.removeprefix("socket:[").removesuffix("]")) for name in names if "socket" in name}
    found = set()
    for table, address in (("tcp", _ipv4), ("tcp6", str)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[9]) in own:
                found.add(address(fields[1]))
    return found


def variables(process: int) -> list[str]:
    """Those that it was started with."""
    return Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")


def _ipv4(words: str) -> str:
    host, _, port = words.partition(":")
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(host))) + f":{int(port, 16)}"
