"""Pages are never over-promised, every request ends, nobody is passed for ever, and no chunk breaks a rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.engine.kv import PAGE_TOKENS, OutOfPages, PagePool, PrefixCache, pages_for
from omnistage.engine.request import TokenRequest
from omnistage.engine.scheduler import MAX_PASSED, MAX_UNREAD, Limits, Scheduler, Sequence

PAGES = 24


def request(prompt: int, answer: int, history: int = 0, start: int = 0) -> TokenRequest:
    return TokenRequest(tuple(range(start, start + prompt)), 0, history + answer, history=tuple(range(history)))


requests = st.builds(
    request, prompt=st.integers(1, 300), answer=st.integers(1, 200), history=st.integers(0, 80), start=st.sampled_from([0, 0, 1000])
).filter(lambda made: pages_for(made.tokens) <= PAGES)
limits = st.builds(
    Limits,
    max_sequences=st.integers(1, 8),
    max_waiting=st.just(99),
    chunk_tokens=st.sampled_from([32, 64, 96]),
    step_tokens=st.sampled_from([96, 128, 200]),
)


class House:
    """A scheduler whose steps cost nothing: what a runner would do to the sequences, and the rules it relies on."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = PagePool(PAGES)
        self.prefixes = PrefixCache(self.pool, 8)
        self.scheduler = Scheduler(self.pool, self.prefixes, limits)

    def step(self) -> list[Sequence]:
        """Run one step; returns the sequences that ended."""
        admitted, taken, _ = self.scheduler.admit()
        assert len(set(taken)) == len(taken)
        for sequence in admitted:
            assert len(sequence.pages) == pages_for(sequence.request.tokens)
            assert sequence.computed < len(sequence.request.prompt)
        running = self.scheduler.admitted
        assert len(running) <= self.limits.max_sequences
        assert self.pool.used <= PAGES
        owned = [
            page for sequence in running for page in sequence.pages[sequence.computed // PAGE_TOKENS :] if self.pool.holders(page) == 1
        ]
        assert len(set(owned)) == len(owned)
        step = self.scheduler.plan()
        assert not {id(sequence) for sequence in step.decode} & {id(chunk.sequence) for chunk in step.chunks}
        assert sum(chunk.count for chunk in step.chunks) <= self.limits.step_tokens
        advanced = list(step.decode)
        for chunk in step.chunks:
            sequence = chunk.sequence
            prompt = len(sequence.request.prompt)
            assert chunk.start == sequence.computed
            assert 0 < chunk.count <= self.limits.chunk_tokens
            assert not chunk.of_prompt or (chunk.start % PAGE_TOKENS == 0 and chunk.start + chunk.count <= prompt)
            sequence.computed += chunk.count
            if chunk.of_prompt and sequence.computed == prompt:
                self.scheduler.remember(sequence)
            if chunk.last:
                advanced.append(sequence)
        ended = []
        for sequence in advanced:
            assert not sequence.parked
            sequence.computed = sequence.known
            sequence.tokens.append(0)
            if len(sequence.tokens) == sequence.request.max_tokens:
                self.scheduler.remove(sequence)
                ended.append(sequence)
        return ended


@given(st.lists(requests, min_size=1, max_size=20), limits)
def test_every_request_ends_within_the_pages_there_are(asked: list[TokenRequest], limits: Limits) -> None:
    house = House(limits)
    for made in asked:
        house.scheduler.add(Sequence(made))
    bound = sum(made.tokens for made in asked) + len(asked)
    ended: list[Sequence] = []
    for _ in range(bound):
        ended += house.step()
        if len(ended) == len(asked):
            break
    assert len(ended) == len(asked)
    assert house.pool.used == len(house.prefixes)


@given(st.data(), limits)
def test_cancels_at_any_moment_leave_nothing_behind(data: st.DataObject, limits: Limits) -> None:
    house = House(limits)
    alive: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["add", "cancel", "step", "step", "unread"]))
        if action == "add":
            alive.append(Sequence(data.draw(requests)))
            house.scheduler.add(alive[-1])
        elif action == "cancel" and alive:
            house.scheduler.remove(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
        elif action == "unread" and alive:
            alive[data.draw(st.integers(0, len(alive) - 1))].unread = data.draw(st.sampled_from([0, MAX_UNREAD]))
        else:
            ended = house.step()
            alive = [sequence for sequence in alive if sequence not in ended]
    for sequence in alive:
        house.scheduler.remove(sequence)
        house.scheduler.remove(sequence)
    assert house.scheduler.waiting == 0
    assert house.scheduler.admitted == ()
    assert house.pool.used == len(house.prefixes)
    house.prefixes.shrink(99)
    assert house.pool.used == 0


def test_a_large_request_is_passed_a_bounded_number_of_times() -> None:
    house = House(Limits(max_sequences=4))
    long_runner = Sequence(request(32, 30))
    large = Sequence(TokenRequest(tuple(range(5000, 5000 + PAGES * PAGE_TOKENS - 10)), 0, 10))
    house.scheduler.add(long_runner)
    house.step()
    house.scheduler.add(large)
    passed = 0
    while large not in house.scheduler.admitted:
        small = Sequence(request(1, 2, start=900))
        house.scheduler.add(small)
        house.step()
        passed += bool(small.tokens)
        assert passed <= MAX_PASSED + 1
    assert passed > 0


def test_decoding_goes_on_while_prompts_are_computed() -> None:
    house = House(Limits(chunk_tokens=32, step_tokens=32))
    first = Sequence(request(3, 100))
    house.scheduler.add(first)
    house.step()
    house.scheduler.add(Sequence(request(200, 5)))
    for expected in range(2, 8):
        house.step()
        assert len(first.tokens) == expected


def test_a_page_is_freed_exactly_once() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    pool.share(pages[:1])
    assert pool.give_back(pages) == pages[1:]
    assert pool.give_back(pages[:1]) == pages[:1]
    assert pool.free == 3
    with pytest.raises(ValueError, match="twice"):
        pool.give_back(pages[:1])
    with pytest.raises(ValueError, match="free"):
        pool.share(pages)
    with pytest.raises(OutOfPages):
        pool.take(4)


def test_limits_are_checked() -> None:
    for wrong in ({"chunk_tokens": 33}, {"chunk_tokens": 0}, {"step_tokens": 32}, {"max_sequences": 0}, {"max_waiting": 0}):
        with pytest.raises(ValueError, match="must"):
            Limits(**wrong)
