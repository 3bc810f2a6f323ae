"""Walking through machine code: programs written here by hand, whose cycles can be counted."""

from __future__ import annotations

import pytest

from autotune.offline.sass import Instruction, Walk, program_of, walk

MEMORY = 500.0
ADD = Instruction(stall=2)
END = Instruction("EXIT")


def load(barrier: int) -> Instruction:
    return Instruction("LDG", width=16, sets=barrier)


def use(*barriers: int) -> Instruction:
    return Instruction(waits=sum(1 << b for b in barriers), stall=2)


def branch(target: int, *, always: bool = False) -> Instruction:
    return Instruction("BRA", always=always, target=target)


def cycles(*code: Instruction, trips: dict[int, int] | None = None) -> float:
    return walk(program_of(code, 32), trips or {}, MEMORY).cycles


def test_loads_side_by_side_cost_one_latency_and_loads_in_turn_two() -> None:
    together = cycles(load(0), load(1), use(0, 1), END)
    in_turn = cycles(load(0), use(0), load(1), use(1), END)
    # The last to be asked for arrives a cycle later; then the use takes 2, and the end 1.
    assert together == MEMORY + 1 + 2 + 1
    assert in_turn == 2 * (MEMORY + 2) + 1


def test_work_between_a_load_and_its_use_is_free() -> None:
    assert cycles(load(0), *[ADD] * 100, use(0), END) == cycles(load(0), use(0), END)
    assert cycles(load(0), *[ADD] * 300, use(0), END) == 1 + 600 + 2 + 1


def test_many_trips_of_a_loop_cost_as_many_times_what_one_does() -> None:
    body = [load(0), use(0), *[ADD] * 10]
    code = [ADD, *body, branch(1), END]
    at = len(code) - 2
    one, hundred, thousand = (cycles(*code, trips={at: n}) for n in (1, 100, 1000))
    trip = MEMORY + 2 + 20 + 1
    assert one == 2 + trip + 1
    assert hundred == pytest.approx(one + 99 * trip)
    assert thousand == pytest.approx(one + 999 * trip)
    walked = walk(program_of(code, 32), {at: 1000}, MEMORY)
    assert walked.loaded == 16 * 1000
    assert walked.issued == 1 + 1000 * (len(body) + 1) + 1


def test_loops_within_loops() -> None:
    inner = [*[ADD] * 10, branch(2)]
    code = [ADD, ADD, *inner, ADD, branch(1), END]
    program = program_of(code, 32)
    assert [(loop.depth, loop.inner) for loop in program.loops] == [(1, True), (0, False)]
    walked = walk(program, {12: 30, 14: 20}, MEMORY)
    assert walked.issued == 1 + 20 * (1 + 30 * 11 + 2) + 1


def pipeline(stages: int) -> float:
    """Cycles of a trip that copies ``stages`` ahead and works for 100."""
    copy, commit = Instruction("LDGSTS", width=16), Instruction("LDGDEPBAR")
    wait = Instruction("DEPBAR", left=stages - 1)
    start = [copy, commit] * stages
    code = [*start, wait, *[ADD] * 50, copy, commit, branch(len(start)), END]
    at = len(code) - 2
    few, many = (cycles(*code, trips={at: n}) for n in (20, 120))
    return (many - few) / 100


def test_copies_ahead_hide_latency() -> None:
    times = [pipeline(stages) for stages in (1, 2, 4, 8)]
    work = 1 + 100 + 3
    # What was asked for at the end of a trip is waited for that many trips later.
    assert times[0] == pytest.approx(MEMORY + work, abs=5)
    assert times[1] == pytest.approx((MEMORY + work) / 2, rel=0.02)
    assert times[3] == pytest.approx(work)
    assert times == sorted(times, reverse=True)


def test_a_branch_to_the_loop_is_taken_and_one_past_it_is_not() -> None:
    body = [*[ADD] * 20, branch(4)]
    past = [branch(99), ADD, ADD, ADD, *body, END]
    past[0] = branch(len(past) - 1)
    assert walk(program_of(past, 32), {24: 50}, MEMORY).issued == 4 + 50 * 21 + 1
    # Nothing to do stands first, and jumps past the loop.
    to = [branch(4), ADD, ADD, branch(25, always=True), *body, END]
    assert walk(program_of(to, 32), {24: 50}, MEMORY).issued == 1 + 50 * 21 + 1


def test_a_loop_that_waits_for_a_barrier_runs_once() -> None:
    spin = [Instruction(), Instruction(), branch(0), END]
    assert program_of(spin, 32).loops == ()
    assert walk(program_of(spin, 32), {}, MEMORY).issued == 4


def test_spilled_bytes_are_counted() -> None:
    code = [Instruction("STL", width=16), Instruction("LDL", width=16), END]
    program = program_of(code, 255)
    assert program.spill_bytes == 16
    assert walk(program, {}, MEMORY).spilled == 32


def test_walks_add_up() -> None:
    a, b = Walk(cycles=10, loaded=4), Walk(cycles=2, loaded=1, stored=8)
    assert a.plus(b, 3.0) == Walk(cycles=16, loaded=7, stored=24)
    assert b.times(0.5) == Walk(cycles=1, loaded=0.5, stored=4)
