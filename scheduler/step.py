"""One step in the making: `fill` says, in one screen, who continues, who is preempted and who is admitted."""

from __future__ import annotations

from scheduler.config import SchedulerConfig
from scheduler.memory import Memory
from scheduler.plan import BatchPlan, Move, ScheduledTokens
from scheduler.queues import Queues
from scheduler.request import Request


class Step:
    """The next step, which a policy fills.

    num_running  requests that ran before it
    """

    def __init__(self, queues: Queues, config: SchedulerConfig, moves: list[Move]) -> None:
        self.queues, self.memory, self.config = queues, queues.memory, config
        self.budget = config.max_num_batched_tokens  # tokens that it still has room for
        self.moves = moves
        self.scheduled: dict[str, ScheduledTokens] = {}
        self.preempted: list[str] = []
        self.admitted: list[str] = []
        self.num_running = len(queues.running)

    def fill(
        self,
        decodes: bool = True,
        prompts: bool = True,
        admit: bool = True,
        least: int = 1,
        whole_prompts: bool = False,
        beyond_budget: bool = False,
    ) -> None:
        """Tokens for those that run, then for those that wait, both in the policy's order.

        decodes, prompts  which of the running requests continue: those that decode, those that do not yet
        admit             whether waiting ones enter; none does after a preemption in this step
        least             admit that many or none
        whole_prompts     admit only prompts that fit into what is left of the budget (or the first one)
        beyond_budget     admit also when the budget is spent: they run from the next step on
        """
        waiting, running, memory = self.queues.waiting, self.queues.running, self.memory
        index = 0
        while index < len(running) and self.budget and (decodes or prompts):  # continue
            request, index = running[index], index + 1
            if request.request_id in self.scheduled or not (decodes if request.is_decoding else prompts):
                continue
            count = min(request.num_tokens - request.num_computed_tokens, self.budget)
            while not memory.grow(request, count, self.moves):  # preempt
                victim = running[-1]
                self._preempt(victim)
                if victim is request:
                    return
            self._schedule(request, count)
        if not admit or self.preempted or not self._enough_fit(least):
            return
        while waiting and memory.free_slots and (self.budget or beyond_budget):  # admit
            request = waiting[0]
            keys, reason = memory.prefix_cache.find(request)
            start = len(keys) * memory.block_size
            if whole_prompts and self.admitted and request.num_tokens - start > self.budget:
                return
            stop = min(request.num_tokens, start + self.budget)
            if not memory.enter(request, keys, stop, self.moves, above_watermark=bool(running)):
                return
            memory.prefix_cache.count(request, len(keys), reason)
            del waiting[0]
            self.queues.run(request)
            self.admitted.append(request.request_id)
            if self.budget:
                self._schedule(request, stop - start)

    @property
    def has_prompts(self) -> bool:
        """Whether a running request does not decode yet."""
        return any(not request.is_decoding for request in self.queues.running)

    @property
    def has_decodes(self) -> bool:
        """Whether a request that decodes has tokens in this step."""
        return any(request.is_decoding and request.request_id in self.scheduled for request in self.queues.running)

    def plan(self, number: int) -> BatchPlan:
        scheduled = tuple(self.scheduled.values())
        return BatchPlan(number, tuple(self.moves), scheduled, tuple(self.preempted), tuple(self.admitted))

    def _schedule(self, request: Request, count: int) -> None:
        start = request.num_computed_tokens
        token_ids = tuple(request.token_ids[start : start + count])
        self.scheduled[request.request_id] = scheduled_tokens(request, self.memory, token_ids)
        self.budget -= count

    def _preempt(self, request: Request) -> None:
        dropped = self.scheduled.pop(request.request_id, None)  # there only where prompts go first
        if dropped is not None:
            self.budget += len(dropped.token_ids)
        if request.request_id in self.admitted:
            self.admitted.remove(request.request_id)
        self.preempted.append(request.request_id)
        self.queues.preempt(request)

    def _enough_fit(self, least: int) -> bool:
        """Whether that many would enter together: TGI puts a batch back that turns out too small."""
        if least <= 1:
            return True
        if least > min(len(self.queues.waiting), len(self.memory.free_slots)):
            return False
        free = min(group.pool.num_free - group.watermark for group in self.memory.groups)
        return self.memory.fit_together(self.queues.waiting[:least], self.config.max_num_batched_tokens, free)


def scheduled_tokens(
    request: Request, memory: Memory, token_ids: tuple[int, ...], drafts: tuple[int, ...] = ()
) -> ScheduledTokens:
    """Its next tokens, which are known, and drafts behind them: with the blocks that they read and write.

    PoolError if a block that is written is another's too, or published.
    """
    start, size = request.num_computed_tokens, memory.block_size
    known = start + len(token_ids)
    stop = known + len(drafts)
    num_blocks = memory.blocks_for(stop)
    table, windows = [table[:num_blocks] for table in request.tables]
    for group in memory.groups:
        for block in request.tables[group.index][start // size : num_blocks]:
            group.pool.require_writable(block)
    ends = range(start // size + 1, stop // size + 1) if memory.prefix_cache.enabled else ()
    assert request.slot is not None
    return ScheduledTokens(
        request_id=request.request_id,
        start=start,
        token_ids=token_ids + drafts,
        block_table=table,
        slot=request.slot,
        checkpoints=tuple((end * size, table[end - 1]) for end in ends),
        first_logits=min(stop, max(start, request.first_logits)),
        samples=(request.request_id, *(fork.request_id for fork in request.forks if not fork.is_finished))
        if known == request.num_tokens
        else (),
        num_drafts=len(drafts),
        window_table=windows,
    )
