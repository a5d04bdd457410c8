"""The pure scheduler under random schedules: conservation after every step, contiguous progress, an empty pool."""

import ast
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import scheduler
from scheduler import (
    POLICIES,
    BlockPool,
    PlanError,
    PoolError,
    Request,
    RequestRefused,
    Scheduler,
    SchedulerConfig,
    check,
)

FOLDER = Path(scheduler.__file__).parent


def random_config(choice: random.Random, policy: str) -> SchedulerConfig:
    num_blocks = choice.randint(6, 40)
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=choice.choice([1, 2, 3, 5, 16]),
        max_num_seqs=choice.randint(1, 8),
        max_num_batched_tokens=choice.randint(1, 40),
        policy=policy,
        prefix_caching=choice.random() < 0.7,
        watermark=choice.choice([0.0, 0.01, 0.2]),
    )


def random_requests(choice: random.Random, config: SchedulerConfig) -> list[tuple[int, Request, list[Request]]]:
    room = config.num_blocks * config.block_size
    drawn = []
    for index in range(25):
        length = choice.randint(1, min(30, room))
        most = choice.randint(1, min(12, room + 1 - length))
        ids = ([7] * choice.randint(0, length) + [choice.randint(0, 3) for _ in range(length)])[:length]
        request = Request(
            f"r{index}",
            tuple(ids),
            most,
            priority=choice.randint(0, 3),
            stop_token_ids=frozenset([5]),
            prompt_logits=choice.random() < 0.2,
        )
        forks = [Request(f"r{index}.{k}", request.prompt_token_ids, most) for k in range(choice.choice([0, 0, 2]))]
        drawn.append((choice.randint(0, 60), request, forks))
    return sorted(drawn, key=lambda pair: pair[0])


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(8))
def test_every_block_is_free_owned_or_cached_after_every_step(policy: str, seed: int):
    choice = random.Random(seed)
    config = random_config(choice, policy)
    subject = Scheduler(config)
    left, step = random_requests(choice, config), 0
    reached: dict[str, int] = {}
    while left or subject.has_unfinished:
        while left and left[0][0] <= step:
            _, request, forks = left.pop(0)
            subject.add(request, forks)
        plan = subject.schedule()
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.scheduled) <= config.max_num_seqs
        assert not (plan.preempted and plan.admitted) or policy == "prefill-first"
        for entry in plan.scheduled:
            request = subject.requests[entry.request_id]
            assert entry.start == request.num_computed_tokens
            assert list(entry.token_ids) == request.token_ids[entry.start : entry.stop]
            assert len(entry.block_table) == -(-entry.stop // config.block_size)
            reached[entry.request_id] = max(reached.get(entry.request_id, 0), entry.stop)
        unfinished = [request for request in subject.requests.values() if not request.is_finished]
        if unfinished and choice.random() < 0.05:
            subject.abort(choice.choice(unfinished).request_id)  # in flight
        names = [name for entry in plan.scheduled for name in entry.samples]
        errors = [entry.request_id for entry in plan.scheduled if choice.random() < 0.01]
        for request in subject.update(plan, {name: [choice.randint(0, 6)] for name in names}, errors):
            assert request.tables[0] == () and request.slot is None
        check(subject)
        if subject.running and step < 200 and choice.random() < 0.1:
            parent = choice.choice(subject.running)
            if parent.max_tokens > parent.num_output_tokens:
                subject.fork(parent.request_id, Request(f"f{step}", parent.prompt_token_ids, parent.max_tokens))
                check(subject)
        step += 1
        assert step < 20000, "no progress"
    assert subject.pool.num_free == config.num_blocks


def answer(subject: Scheduler, plan: scheduler.BatchPlan, token: int = 9) -> None:
    subject.update(plan, {name: [token] for entry in plan.scheduled for name in entry.samples})


def test_a_hit_never_covers_the_last_prompt_token_and_needs_full_blocks():
    subject = Scheduler(SchedulerConfig(num_blocks=20, block_size=2))
    for name, ids, hit in (("a", (1, 2, 3, 4), 0), ("b", (1, 2, 3, 4), 2), ("c", (1, 2, 3, 4, 5), 4), ("d", (1, 9), 0)):
        request = Request(name, ids, 1)
        subject.add(request)
        answer(subject, subject.schedule())
        assert request.num_cached_tokens == hit, name
    salted = Request("e", (1, 2, 3, 4, 5), 1, cache_salt="other")
    subject.add(salted)
    answer(subject, subject.schedule())
    assert salted.num_cached_tokens == 0


def test_nothing_is_published_before_update():
    subject = Scheduler(SchedulerConfig(num_blocks=20, block_size=2))
    subject.add(Request("a", (1, 2, 3, 4, 5), 1))
    plan = subject.schedule()
    assert not subject.pool.block_of
    answer(subject, plan)
    assert len(subject.pool.block_of) == 2


def test_waiting_served_follows_tgis_counters():
    """Four run and one waits: floor(4 * 0.3) = 1 lets it in at once; with ratio 2.0 only max_waiting_tokens does."""
    for ratio, decodes_before in ((0.3, 0), (2.0, 4)):
        config = SchedulerConfig(
            num_blocks=100, policy="waiting-served", waiting_served_ratio=ratio, max_waiting_tokens=5
        )
        subject = Scheduler(config)
        for index in range(4):
            subject.add(Request(str(index), (1, 2, index), 50))
        answer(subject, subject.schedule())
        subject.add(Request("late", (1, 2, 3), 50))
        decodes = 0
        while True:
            plan = subject.schedule()
            answer(subject, plan)
            if plan.admitted:
                break
            decodes += 1
        assert decodes == decodes_before
        assert [entry.request_id for entry in plan.scheduled] == ["late"], "decoding pauses"
        assert len(subject.schedule().scheduled) == 5


def test_a_static_batch_admits_no_one_until_its_longest_member_ends():
    subject = Scheduler(SchedulerConfig(num_blocks=100, policy="static", max_num_seqs=2))
    for name, most in (("a", 2), ("b", 6), ("c", 1)):
        subject.add(Request(name, (1, 2), most))
    seen = []
    while subject.has_unfinished:
        plan = subject.schedule()
        seen.append([entry.request_id for entry in plan.scheduled])
        answer(subject, plan)
    assert seen == [["a", "b"], ["a", "b"], ["b"], ["b"], ["b"], ["b"], ["c"]]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_endless_stream_of_others_starves_no_one(policy: str):
    """policy.py's bounds: nobody who arrived later is served first (priority: 1,000 steps later a level), and once
    it decodes, the next token comes within 9 steps (prefill-first: 8 without decodes)."""
    config = SchedulerConfig(num_blocks=40, block_size=2, max_num_seqs=3, max_num_batched_tokens=8, policy=policy)
    subject = Scheduler(config)
    target = Request("target", (1, 2, 3), 6, priority=1)
    served: list[int] = []
    overtook: list[int] = []  # how many steps later they had arrived
    for step in range(1500):
        if step == 5:
            subject.add(target)
        for k in range(2 if len(subject.waiting) < 40 else 0):
            subject.add(Request(f"{step}.{k}", (1, step, k), 2))
        plan = subject.schedule()
        names = {entry.request_id for entry in plan.scheduled}
        if "target" in names:
            served.append(step)
        elif step >= 5 and not served:
            overtook += [subject.requests[name].arrival_step - 5 for name in names]
            later = [name for name in names if subject.requests[name].arrival > target.arrival]
            assert policy == "priority" or not later
        answer(subject, plan)
        if target.is_finished:
            break
    assert target.is_finished
    assert max(after - before for before, after in pairwise(served)) <= 9
    if policy == "priority":
        assert 0 < max(overtook) <= 1000


def test_refusals_name_the_thing_and_leave_the_rest_alone():
    subject = Scheduler(SchedulerConfig(num_blocks=4, block_size=2))
    subject.add(Request("a", (1, 2, 3), 3))
    for bad, fragment in (
        (lambda: subject.add(Request("a", (1,), 1)), "already in use"),
        (lambda: subject.add(Request("b", (1,) * 5, 5)), "need 5 blocks of 2; the pool has 4"),
        (lambda: Request("b", (), 1), "prompt of 0 tokens"),
        (lambda: subject.abort("nobody"), "not known"),
    ):
        with pytest.raises(RequestRefused, match=fragment):
            bad()
    plan = subject.schedule()
    with pytest.raises(PlanError, match="in flight"):
        subject.schedule()
    with pytest.raises(PlanError, match="expected 1 token"):
        subject.update(plan, {})
    answer(subject, plan)
    with pytest.raises(PlanError, match="not in flight"):
        answer(subject, plan)
    check(subject)


def test_the_pool_refuses_misuse():
    pool = BlockPool(2)
    block, _ = pool.allocate()
    pool.share(block)
    with pytest.raises(PoolError, match="owned by 2 tables"):
        pool.require_writable(block)
    pool.release(block)
    pool.require_writable(block)
    assert pool.publish(block, b"key")
    with pytest.raises(PoolError, match="published"):
        pool.require_writable(block)
    pool.release(block)
    with pytest.raises(PoolError, match="double free"):
        pool.release(block)
    assert pool.free_order() == [1, 0], "the block with a key is evicted last"
    with pytest.raises(PoolError, match="free"):
        pool.share(1)
    pool.allocate()
    assert pool.allocate() == (0, b"key")
    with pytest.raises(PoolError, match="no block is free"):
        pool.allocate()


def test_the_scheduler_needs_the_standard_library_only():
    script = "import sys; sys.modules['numpy'] = sys.modules['lfm2np'] = None; import scheduler"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=FOLDER.parent)
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert all(name.split(".")[0] in {*sys.stdlib_module_names, "scheduler"} for name in names), file


def test_prefill_first_lets_a_decode_wait_eight_steps_and_no_more():
    """Prompts that fill every step's budget and end with their first token: the worst stream for a decode."""
    config = SchedulerConfig(
        num_blocks=60, block_size=2, max_num_seqs=3, max_num_batched_tokens=8, policy="prefill-first"
    )
    subject = Scheduler(config)
    target, served = Request("target", (1, 2), 6), []
    subject.add(target)
    for step in range(200):
        subject.add(Request(f"{step}", (1, step, 3, 4, 5, 6, 7, 8), 1))
        plan = subject.schedule()
        served += [step] if any(entry.request_id == "target" for entry in plan.scheduled) else []
        answer(subject, plan)
        if target.is_finished:
            break
    assert target.is_finished
    assert max(after - before for before, after in pairwise(served)) == 9
