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


def with_free_list(subject: Scheduler, order: list[int]) -> None:
    """Another free list than the ring's, of the right length."""
    subject.pool.free_order = lambda: order  # type: ignore[method-assign]
    subject.pool.num_free = len(order)


def set_attribute(name: str, attribute: str, value: object) -> Callable[[Scheduler], None]:
    return lambda subject: setattr(subject.requests[name], attribute, value)


def count_free(difference: int) -> Callable[[Scheduler], None]:
    def change(subject: Scheduler) -> None:
        subject.pool.num_free += difference

    return change


def count_references(owned: bool, difference: int) -> Callable[[Scheduler], None]:
    def change(subject: Scheduler) -> None:
        block = subject.requests["b"].tables[0][0] if owned else subject.pool.free_order()[0]
        subject.pool.references[block] += difference

    return change


def free_twice(subject: Scheduler) -> None:
    order = subject.pool.free_order()
    with_free_list(subject, [*order, order[-1]])


def free_twice_but_counted_once(subject: Scheduler) -> None:
    order = subject.pool.free_order()
    with_free_list(subject, [*order, order[-1]])
    subject.pool.num_free -= 1


def free_though_owned(subject: Scheduler) -> None:
    with_free_list(subject, [*subject.pool.free_order(), subject.requests["a"].tables[0][0]])


def lost(subject: Scheduler) -> None:
    with_free_list(subject, subject.pool.free_order()[1:])


def cached_first(subject: Scheduler) -> None:
    with_free_list(subject, subject.pool.free_order()[::-1])


def key_of_no_block(subject: Scheduler) -> None:
    subject.pool.block_of[KEY] = subject.requests["a"].tables[0][0]


def key_that_leads_nowhere(subject: Scheduler) -> None:
    subject.pool.key_of[subject.pool.free_order()[0]] = KEY


def key_that_leads_elsewhere(subject: Scheduler) -> None:
    (key, block), *_ = subject.pool.block_of.items()
    subject.pool.block_of[key] = block + 1


def slot_twice(subject: Scheduler) -> None:
    subject.requests["a"].slot = subject.requests["b"].slot


def slot_lost(subject: Scheduler) -> None:
    subject.memory.free_slots.pop()


def slot_invented(subject: Scheduler) -> None:
    subject.memory.free_slots.append(9)


def out_of_order(subject: Scheduler) -> None:
    subject.running.reverse()


def queue_shorter(subject: Scheduler) -> None:
    subject.waiting.pop()


def queue_out_of_order(subject: Scheduler) -> None:
    subject.waiting.reverse()


def queued_too(name: str) -> Callable[[Scheduler], None]:
    return lambda subject: insort(subject.waiting, subject.requests[name], key=subject.policy.key)


def nothing_to_do(subject: Scheduler) -> None:
    subject.requests["b"].num_computed_tokens = subject.requests["b"].num_tokens


def one_block_more(subject: Scheduler) -> None:
    request = subject.requests["b"]
    request.tables[0] = (*request.tables[0], subject.pool.allocate()[0])


def one_block_less(subject: Scheduler) -> None:
    request = subject.requests["b"]
    subject.pool.release(request.tables[0][-1])
    request.tables[0] = request.tables[0][:-1]


IN_NO_PLACE = "in no place"
NOT_THE_QUEUE = "the queue is out of order, or not of those that wait"
CORRUPTIONS: tuple[tuple[str, Callable[[], Scheduler], Callable[[Scheduler], None]], ...] = (
    ("blocks expected", busy, count_free(1)),
    ("blocks expected", busy, count_free(-1)),
    ("blocks expected", busy, free_twice),
    ("blocks expected", busy, free_twice_but_counted_once),
    ("references, but", busy, count_references(owned=True, difference=1)),
    ("references, but", busy, count_references(owned=True, difference=-1)),
    ("references, but", busy, count_references(owned=False, difference=1)),
    ("references, but", busy, count_references(owned=False, difference=-1)),
    ("]: free and owned", busy, free_though_owned),
    ("a block is neither free nor owned", busy, lost),
    ("its key leads elsewhere", busy, key_that_leads_nowhere),
    ("its key leads elsewhere", busy, key_that_leads_elsewhere),
    ("a key leads to a block that has none", busy, key_of_no_block),
    ("a block with a key stands before one without in the free list", busy, cached_first),
    ("each running request has its own", busy, slot_twice),
    ("each running request has its own", busy, set_attribute("a", "slot", None)),
    ("one is lost", busy, slot_lost),
    ("one is lost", busy, slot_invented),
    ("the running requests are out of order", busy, out_of_order),
    (NOT_THE_QUEUE, busy, queue_shorter),
    (NOT_THE_QUEUE, busy, queue_out_of_order),
    (NOT_THE_QUEUE, busy, queued_too("a")),
    (NOT_THE_QUEUE, busy, queued_too("w")),
    (NOT_THE_QUEUE, busy, queued_too("y")),
    (IN_NO_PLACE, busy, set_attribute("w", "slot", 3)),
    (IN_NO_PLACE, busy, set_attribute("a", "status", Status.WAITING)),
    (IN_NO_PLACE, busy, set_attribute("a", "awaits_split", True)),
    (IN_NO_PLACE, busy, set_attribute("y", "status", Status.RUNNING)),
    ("nothing to do", busy, nothing_to_do),
    ("nothing to do", busy, set_attribute("w", "num_computed_tokens", 2)),
    ("nothing to do", busy, set_attribute("w", "num_computed_tokens", 1)),
    ("blocks, its tokens need", busy, one_block_more),
    ("blocks, its tokens need", busy, one_block_less),
    ("shares a block that it reserves", reserved, shared_reserve),
    ("but owns blocks", busy, set_attribute("w", "tables", [(11,), ()])),
)


@internal(
    "corruption-is-seen",
    "Whatever does not add up between steps, scheduler.check names.",
    7,
    lambda: st.just("all"),
    bugs=("vLLM 14326", "SGLang 35270"),
)
def corruption_is_seen(example: str) -> None:
    for message, make, corrupt in CORRUPTIONS:
        subject = make()
        check(subject)
        corrupt(subject)
        try:
            check(subject)
        except PoolError as error:
            if not str(error).startswith("conservation: ") or message not in str(error):
                raise Violation(f"check says {str(error)!r}, expected {message!r}") from None
            continue
        raise Violation(f"check sees nothing, expected {message!r}")


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
    try:
        subject.schedule()
    except PoolError as error:
        if "is to be written, but it is published" not in str(error):
            raise Violation(
                f"schedule() says {str(error)!r}, expected that a published block would be written"
            ) from None
        return
    raise Violation("a plan writes to a published block")
