"""Pages: the bitmap, reference counts, the prefix cache, and what must hold whatever happens."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from model.pages import FreePages, PagePool, digests

SIZE = 4  # tokens of a page


# ---- the bitmap --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_every_page_is_handed_out_once_and_in_order(count: int) -> None:
    free = FreePages(count)
    some = count // 3
    assert free.take(some) == list(range(some))
    assert free.take(0) == []
    assert free.take(count - some) == list(range(some, count))
    assert free.count == 0
    with pytest.raises(AssertionError):
        free.take(1)
    assert not any(page in free for page in range(count))


def test_pages_come_back_and_a_second_time_is_an_error() -> None:
    free = FreePages(130)
    taken = free.take(130)
    free.give(taken[60:70])
    assert (free.count, 63 in free, 59 in free) == (10, True, False)
    assert sorted(free.take(10)) == list(range(60, 70))
    free.give([5])
    for page in (5, 130, -1):
        with pytest.raises(AssertionError):
            free.give([page])
    assert free.count == 1


def test_sixty_thousand_pages_are_7500_bytes_of_bits() -> None:
    free = FreePages(60_000)
    assert free.num_bytes() == 938 * (8 + 4)  # the words, and the stack of those with a free bit


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.randoms(use_true_random=False))
def test_bitmap_is_a_set(count: int, rng: random.Random) -> None:
    free, held = FreePages(count), set[int]()
    for _ in range(300):
        if free.count and rng.random() < 0.55:
            pages = free.take(rng.randrange(min(free.count, 9) + 1))
            assert not held & set(pages)
            held.update(pages)
        elif held:
            page = rng.choice(sorted(held))
            held.remove(page)
            free.give([page])
        assert free.count == count - len(held)
    assert {p for p in range(count) if p in free} == set(range(count)) - held


# ---- digests -----------------------------------------------------------------------------------


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_a_digest_names_all_tokens_before_it() -> None:
    one = digests(ints(1, 2, 3, 4, 5, 6, 7, 8, 9), 4)
    other = digests(ints(0, 2, 3, 4, 5, 6, 7, 8), 4)
    assert len(one) == len(other) == 2
    assert one[1] != other[1]  # the same page after another one
    assert digests(ints(1, 2, 3, 4, 5, 6, 7, 9), 4)[0] == one[0]
    assert digests(ints(1, 2, 3, 4, 5, 6, 7, 9), 4)[1] != one[1]
    assert digests(ints(1, 2, 3, 4, 5, 6, 7, 8), 4, known=one[:1]) == one
    assert digests(ints(1, 2, 3), 4) == []
    assert len({digests(ints(1, 2, 3, 4), 4)[0], digests(ints(1, 2, 3, 4), 2)[1]}) == 2


# ---- the pool ----------------------------------------------------------------------------------


def test_a_prefix_is_found_until_it_is_evicted() -> None:
    pool = PagePool(4)
    names = digests(np.arange(16, dtype=np.int32), SIZE)
    held = pool.take(3)
    for page, name in zip(held, names, strict=False):
        pool.publish(page, name)
    assert pool.find(names) == held
    pool.give(held)
    assert pool.available == 4
    assert pool.stale == []
    pool.take(2)  # the free one, and the end of the prefix
    assert pool.stale == [held[2]]
    assert pool.find(names) == held[:2]
    pool.share(held[:1])
    with pytest.raises(ValueError, match="expected 2 available pages, got 1"):
        pool.take(2)
    pool.take(1)
    assert pool.find(names) == held[:1]
    assert pool.available == 0


def test_without_prefix_cache_nothing_is_found() -> None:
    pool = PagePool(2, prefix_cache=False)
    names = digests(np.arange(4, dtype=np.int32), SIZE)
    pages = pool.take(1)
    pool.publish(pages[0], names[0])
    pool.give(pages)
    assert pool.find(names) == []
    assert (pool.free.count, pool.stale) == (2, pages)


def test_what_is_used_again_is_evicted_later() -> None:
    pool = PagePool(2)
    first, second = (digests(ints(i, i, i, i), SIZE) for i in (1, 2))
    pages = pool.take(2)
    pool.publish(pages[0], first[0])
    pool.publish(pages[1], second[0])
    pool.give(pages[:1])
    pool.give(pages[1:])
    pool.share(pages[:1])
    pool.give(pages[:1])
    pool.take(1)
    assert pool.find(first) == pages[:1]
    assert pool.find(second) == []


# ---- whatever happens --------------------------------------------------------------------------


@dataclass
class Request:
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)


class Requests:
    """Requests over a pool as the engine has them, and what each page holds."""

    def __init__(self, num_pages: int, seed: int) -> None:
        self.pool, self.rng = PagePool(num_pages), random.Random(seed)
        self.requests: list[Request] = []
        self.contents: list[list[int] | None] = [None] * num_pages  # None: whatever is there
        self.done: Counter[str] = Counter()

    def _take(self, count: int) -> list[int] | None:
        before = (self.pool.free.count, list(self.pool.idle), list(self.pool.owners))
        if count > self.pool.available:
            with pytest.raises(ValueError, match="available pages"):
                self.pool.take(count)
            assert before == (self.pool.free.count, list(self.pool.idle), list(self.pool.owners))
            self.done["refused"] += 1
            return None
        self.done["evicted"] += max(0, count - self.pool.free.count)
        pages = self.pool.take(count)
        for page in self.pool.stale:
            self.contents[page] = None
        self.pool.stale.clear()
        # Each page that held something was reported as stale before it is written again.
        assert all(self.contents[page] is None for page in pages)
        for page in pages:
            self.contents[page] = []
        return pages

    def _write(self, request: Request, start: int) -> None:
        """Tokens from ``start`` on go into the request's pages; full ones are published."""
        for i in range(start, len(request.tokens)):
            page = request.pages[i // SIZE]
            content = self.contents[page]
            assert content is not None
            assert len(content) == i % SIZE, "written out of order, or by two owners"
            assert self.pool.owners[page] == 1
            content.append(request.tokens[i])
        request.names = digests(np.array(request.tokens, np.int32), SIZE, request.names)
        for i in range(start // SIZE, len(request.names)):
            self.pool.publish(request.pages[i], request.names[i])

    def add(self) -> None:
        """Prompts of few different tokens, so that prefixes are often the same."""
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 6 * SIZE))]
        names = digests(np.array(tokens, np.int32), SIZE)
        found = self.pool.find(names[: (len(tokens) - 1) // SIZE])
        self.pool.share(found)
        more = self._take(-(-len(tokens) // SIZE) - len(found))
        if more is None:
            self.pool.give(found)
            return
        self.done["found"] += len(found)
        request = Request(tokens, [*found, *more], names[: len(found)])
        self._write(request, len(found) * SIZE)
        self.requests.append(request)

    def append(self) -> None:
        request = self.rng.choice(self.requests)
        if len(request.tokens) % SIZE == 0:
            more = self._take(1)
            if more is None:
                return
            request.pages += more
        request.tokens.append(self.rng.randrange(2))
        self._write(request, len(request.tokens) - 1)

    def fork(self) -> None:
        """Full pages are shared; the last one, where it is not, is written anew."""
        parent = self.rng.choice(self.requests)
        whole = len(parent.tokens) // SIZE
        shared = parent.pages[:whole]
        self.pool.share(shared)
        more = self._take(len(parent.pages) - whole)
        if more is None:
            self.pool.give(shared)
            return
        self.done["forked"] += 1
        child = Request(list(parent.tokens), [*shared, *more], parent.names[:whole])
        self._write(child, whole * SIZE)
        self.requests.append(child)

    def free(self) -> None:
        request = self.requests.pop(self.rng.randrange(len(self.requests)))
        self.pool.give(request.pages)

    def step(self) -> None:
        actions = [self.add, self.append, self.append, self.append]
        if self.requests:
            actions += [self.fork, self.free]
        else:
            actions = [self.add]
        self.rng.choice(actions)()

    def check(self) -> None:
        pool = self.pool
        owners = Counter(page for r in self.requests for page in r.pages)
        assert [owners[p] for p in range(pool.num_pages)] == pool.owners
        free = {p for p in range(pool.num_pages) if p in pool.free}
        assert len(free) == pool.free.count
        # Free, held and idle: each page is one of these, so nothing leaks.
        assert not free & owners.keys()
        assert not free & pool.idle.keys()
        assert not owners.keys() & pool.idle.keys()
        assert len(free) + len(owners) + len(pool.idle) == pool.num_pages
        for request in self.requests:
            for i, page in enumerate(request.pages):
                assert self.contents[page] == request.tokens[i * SIZE : (i + 1) * SIZE]
                assert owners[page] == 1 or len(self.contents[page] or []) == SIZE
        # What would be found holds what its digest says.
        assert {d: p for p, d in pool._digest_of.items()} == pool._page_of
        assert pool.idle.keys() <= pool._digest_of.keys()
        assert not free & pool._digest_of.keys()

    def end(self) -> None:
        for request in self.requests:
            self.pool.give(request.pages)
        self.requests.clear()
        self.check()
        assert self.pool.available == self.pool.num_pages


@settings(max_examples=20, deadline=None)
@given(st.integers(24, 150), st.integers(0, 2**32))
def test_nothing_leaks_in_5000_steps(num_pages: int, seed: int) -> None:
    """20 times 5,000 are the 10^5 steps; each invariant is looked at every few of them."""
    world = Requests(num_pages, seed)
    for i in range(5_000):
        world.step()
        if i % 20 == 0:
            world.check()
    for kind in ("refused", "evicted", "found", "forked"):
        assert world.done[kind], f"never {kind}"
    world.end()


class Machine(RuleBasedStateMachine):
    """The same in few steps, each looked at, so that a failure comes as a short story."""

    def __init__(self) -> None:
        super().__init__()
        self.world = Requests(9, 0)

    @rule(seed=st.integers(0, 99))
    def add(self, seed: int) -> None:
        self.world.rng.seed(seed)
        self.world.add()

    @precondition(lambda self: self.world.requests)
    @rule(seed=st.integers(0, 99), action=st.sampled_from(["append", "fork", "free"]))
    def change(self, seed: int, action: str) -> None:
        self.world.rng.seed(seed)
        getattr(self.world, action)()

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.end()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


def test_the_check_sees_planted_faults() -> None:
    """The invariants above must be able to fail."""
    for fault in ("leak", "double", "owner"):
        world = Requests(20, 1)
        while len(world.requests) < 2:
            world.add()
        if fault == "leak":
            world.pool.free.take(1)
        elif fault == "double":
            world.requests[1].pages[0] = world.requests[0].pages[-1]
        else:
            world.pool.owners[world.requests[0].pages[0]] += 1
        with pytest.raises(AssertionError):
            world.check()
