"""The check of the checker: scheduler.check names whatever is made to not add up.

Every run of the suite trusts it to see a block that is lost, owned twice or cached out of order.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from hypothesis import strategies as st

from internal_properties.internal import internal
from lfm2np.suite.properties.property import Violation
from scheduler import PoolError, Request, Scheduler, SchedulerConfig, check
from scheduler.request import Status

KEY = b"made up"
Corruption = Callable[[Scheduler], object]


def answer_step(subject: Scheduler) -> None:
    plan = subject.schedule()
    subject.update(plan, {name: [9] for entry in plan.scheduled for name in entry.samples})


def busy() -> Scheduler:
    """a, b and c run, a and c share a block; w and x wait, y waits for x; z has left cached blocks."""
    subject = Scheduler(SchedulerConfig(num_blocks=12, block_size=2, max_num_seqs=4))
    subject.add(Request("z", (7, 7, 7), 1))
    answer_step(subject)
    subject.add(Request("a", (1, 2, 3), 9))
    subject.add(Request("b", (1, 4, 4, 5), 9))
    answer_step(subject)
    subject.fork("a", Request("c", (1, 2, 3), 9))
    subject.add(Request("w", (9,), 2))
    subject.add(Request("x", (8, 8), 2), [Request("y", (8, 8), 2)])
    return subject


def reserved() -> Scheduler:
    """Two requests with the blocks for their whole length."""
    subject = Scheduler(SchedulerConfig(num_blocks=12, block_size=2, policy="static"))
    subject.add(Request("a", (1, 2, 3), 4))
    subject.add(Request("b", (4, 5, 6), 4))
    answer_step(subject)
    return subject


def shared_reserve(subject: Scheduler) -> None:
    """b's last block, which it will write to, is a's."""
    a, b = subject.requests["a"], subject.requests["b"]
    subject.pool.share(a.tables[0][-1])
    subject.pool.release(b.tables[0][-1])
    b.tables[0] = (*b.tables[0][:-1], a.tables[0][-1])


def blocks_of_b(change: Callable[[Scheduler, tuple[int, ...]], tuple[int, ...]]) -> Corruption:
    def corrupt(subject: Scheduler) -> None:
        subject.requests["b"].tables[0] = change(subject, subject.requests["b"].tables[0])

    return corrupt


def without_last(subject: Scheduler, table: tuple[int, ...]) -> tuple[int, ...]:
    subject.pool.release(table[-1])
    return table[:-1]


def free_list(change: Callable[[list[int], Scheduler], list[int]], uncounted: int = 0) -> Corruption:
    """Another free list than the ring's, and its length but for so many."""

    def corrupt(subject: Scheduler) -> None:
        order = change(subject.pool.free_order(), subject)
        subject.pool.free_order = lambda: order  # type: ignore[method-assign]
        subject.pool.num_free = len(order) - uncounted

    return corrupt


def attribute(name: str, field: str, value: object) -> Corruption:
    return lambda subject: setattr(subject.requests[name], field, value)


def count_free(difference: int) -> Corruption:
    return lambda subject: setattr(subject.pool, "num_free", subject.pool.num_free + difference)


def references(difference: int, owned: bool) -> Corruption:
    def corrupt(subject: Scheduler) -> None:
        block = subject.requests["b"].tables[0][0] if owned else subject.pool.free_order()[0]
        subject.pool.references[block] += difference

    return corrupt


def key_leads_elsewhere(subject: Scheduler) -> None:
    (key, block), *_ = subject.pool.block_of.items()
    subject.pool.block_of[key] = block + 1


def queued_too(name: str) -> Corruption:
    return lambda subject: insort(subject.waiting, subject.requests[name], key=subject.policy.key)


CORRUPTIONS: dict[str, tuple[Corruption, ...]] = {  # what the error says: of a `busy` scheduler
    "blocks expected": (
        count_free(1),
        count_free(-1),
        free_list(lambda order, subject: [*order, order[-1]]),
        free_list(lambda order, subject: [*order, order[-1]], uncounted=1),
    ),
    "references, but": tuple(references(difference, owned) for difference in (1, -1) for owned in (True, False)),
    "]: free and owned": (free_list(lambda order, subject: [*order, subject.requests["a"].tables[0][0]]),),
    "a block is neither free nor owned": (free_list(lambda order, subject: order[1:]),),
    "its key leads elsewhere": (
        lambda subject: subject.pool.key_of.__setitem__(subject.pool.free_order()[0], KEY),
        key_leads_elsewhere,
    ),
    "a key leads to a block that has none": (
        lambda subject: subject.pool.block_of.__setitem__(KEY, subject.requests["a"].tables[0][0]),
    ),
    "a block with a key stands before one without": (free_list(lambda order, subject: order[::-1]),),
    "each running request has its own": (
        lambda subject: setattr(subject.requests["a"], "slot", subject.requests["b"].slot),
        attribute("a", "slot", None),
    ),
    "one is lost": (
        lambda subject: subject.memory.free_slots.pop(),
        lambda subject: subject.memory.free_slots.append(9),
    ),
    "the running requests are out of order": (lambda subject: subject.running.reverse(),),
    "the queue is out of order, or not of those that wait": (
        lambda subject: subject.waiting.pop(),
        lambda subject: subject.waiting.reverse(),
        *map(queued_too, "awy"),
    ),
    "in no place": (
        attribute("w", "slot", 3),
        attribute("a", "status", Status.WAITING),
        attribute("a", "awaits_split", True),
        attribute("y", "status", Status.RUNNING),
    ),
    "nothing to do": (
        lambda subject: setattr(subject.requests["b"], "num_computed_tokens", subject.requests["b"].num_tokens),
        attribute("w", "num_computed_tokens", 2),
        attribute("w", "num_computed_tokens", 1),
    ),
    "blocks, its tokens need": (
        blocks_of_b(lambda subject, table: (*table, subject.pool.allocate()[0])),
        blocks_of_b(without_last),
    ),
    "but owns blocks": (attribute("w", "tables", [(11,), ()]),),
    "a table of no group": (lambda subject: subject.requests["a"].tables.__setitem__(1, (0,)),),
}


@internal(
    "corruption-is-seen",
    "Whatever does not add up between steps, scheduler.check names.",
    7,
    lambda: st.just("all"),
    bugs=("vLLM 14326", "SGLang 35270"),
)
def corruption_is_seen(example: str) -> None:
    cases = [(busy, message, each) for message, corruptions in CORRUPTIONS.items() for each in corruptions]
    for make, message, corrupt in (*cases, (reserved, "shares a block that it reserves", shared_reserve)):
        subject = make()
        check(subject)
        corrupt(subject)
        require_refusal(lambda subject=subject: check(subject), message)  # type: ignore[misc]


def require_refusal(call: Callable[[], object], message: str) -> None:
    try:
        call()
    except PoolError as error:
        if message not in str(error):
            raise Violation(f"it says {str(error)!r}, expected {message!r}") from None
        return
    raise Violation(f"nothing is seen, expected {message!r}")


@internal(
    "published-blocks-are-not-written",
    "A plan that would write to a published block is refused.",
    5,
    lambda: st.just("all"),
    bugs=("SGLang 38319",),
)
def unwritable(example: str) -> None:
    """A block that is published before it is full: the next plan that would write to it is refused."""
    subject = busy()
    subject.abort("c")
    answer_step(subject)
    request = subject.requests["b"]
    subject.pool.publish(request.tables[0][-1], KEY)
    require_refusal(subject.schedule, "is to be written, but it is published")
