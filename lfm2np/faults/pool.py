"""Section B, continued: who owns a block of the pool, and who gets one."""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Fault

# Where the edits are made.
ALLOCATE = "scheduler.block_pool:BlockPool.allocate"
RELEASE = "scheduler.memory:Memory.release"
PUBLISH = "scheduler.prefix_cache:PrefixCache.publish"

# The pool refuses what would corrupt it. Real engines had no such guards: these take them out.
UNGUARDED_WRITE = Edit(
    "scheduler.block_pool:BlockPool.require_writable",
    "if self.references[block] != 1 or self.key_of[block] is not None:",
    "if False:",
)
UNGUARDED_RELEASE = (
    Edit("scheduler.block_pool:BlockPool._require_owned", "if self.references[block] < owners:", "if False:"),
    Edit(
        "scheduler.block_pool:BlockPool.release",
        "self._require_owned(block)\n",
        "if self.references[block] == 0:\n        return\n",
    ),
)
UNGUARDED_PUBLISH = Edit(
    "scheduler.block_pool:BlockPool.publish",
    'raise PoolError(f"block {block} is published, but no one owns it: use after free")',
    "return False",
)
UNGUARDED_SHARE = Edit(
    "scheduler.block_pool:BlockPool.share",
    'if self.key_of[block] is None:\n            raise PoolError(f"block {block} is free: it can\'t be shared")\n',
    "",
)
FAULTS: tuple[Fault, ...] = (
    # --- who owns a block
    Fault(
        name="fork-is-not-atomic",
        section="B",
        sentence="A fork for which blocks are short keeps the slot and the shares that it took before that showed.",
        seen_in=("transformers 46117",),
        edits=(
            Edit(
                "scheduler.memory:Memory.split",
                "or reserve > self.pool.num_free:\n"
                "        return False\n"
                "    child.slot = self.free_slots.pop()\n"
                "    child.block_table = parent.block_table[:used]\n"
                "    for block in child.block_table:\n"
                "        self.pool.share(block)\n",
                ":\n"
                "        return False\n"
                "    child.slot = self.free_slots.pop()\n"
                "    child.block_table = parent.block_table[:used]\n"
                "    for block in child.block_table:\n"
                "        self.pool.share(block)\n"
                "    if reserve > self.pool.num_free:\n"
                "        return False\n",
            ),
        ),
    ),
    Fault(
        name="duplicate-block-freed-while-in-a-table",
        section="B",
        sentence="A block whose content another block already has is released, but its request goes on using it.",
        seen_in=("mini-sglang 142",),
        edits=(
            Edit(
                PUBLISH,
                "if self.pool.key_of[block] is None and self.pool.publish(block, keys[index]):\n"
                "            self._evicted.pop(keys[index], None)",
                "if self.pool.key_of[block] is None:\n"
                "            if self.pool.publish(block, keys[index]):\n"
                "                self._evicted.pop(keys[index], None)\n"
                "            else:\n"
                "                self.pool.release(block)",
            ),
            *UNGUARDED_RELEASE,
            UNGUARDED_SHARE,
            UNGUARDED_PUBLISH,
            UNGUARDED_WRITE,
        ),
    ),
    Fault(
        name="blocks-released-twice",
        section="B",
        sentence="A request that ends or is preempted gives each of its blocks back twice, also those that are shared.",
        seen_in=("sglang-jax 982",),
        edits=(
            Edit(
                RELEASE,
                "self.pool.release_table(request.block_table)",
                "self.pool.release_table(request.block_table * 2)",
            ),
            *UNGUARDED_RELEASE,
            UNGUARDED_SHARE,
            UNGUARDED_PUBLISH,
            UNGUARDED_WRITE,
        ),
    ),
    Fault(
        name="abort-leaks-blocks",
        section="B",
        sentence="The blocks of a request that is aborted are never given back.",
        seen_in=("vLLM 14326", "vLLM 46283", "vLLM 18485"),
        edits=(
            Edit(
                RELEASE,
                "self.pool.release_table(request.block_table)",
                'if request.finish_reason != "abort":\n        self.pool.release_table(request.block_table)',
            ),
        ),
    ),
    Fault(
        name="blocks-freed-while-the-step-is-in-flight",
        section="B",
        sentence="The blocks of a request that is aborted in flight are free at once, while the step still uses them.",
        seen_in=("vLLM 45357", "SGLang 35049"),
        edits=(
            Edit(
                "scheduler.scheduler:Scheduler._finish",
                "if request.request_id in self._in_flight:\n        return",
                "if request.request_id in self._in_flight:\n"
                "        self.pool.release_table(request.block_table)\n"
                "        request.block_table = ()\n"
                "        return",
            ),
        ),
    ),
    Fault(
        name="blocks-of-rejected-drafts-leak",
        section="B",
        sentence="Blocks that only rejected drafts needed leave the table, and are never given back.",
        seen_in=(),
        edits=(Edit("scheduler.memory:Memory.shrink", "self.pool.release_table(request.block_table[used:])", "pass"),),
    ),
    Fault(
        name="blocks-of-rejected-drafts-are-kept",
        section="B",
        sentence="Blocks that only rejected drafts needed stay in the table until the request ends.",
        seen_in=(),
        edits=(
            Edit(
                "scheduler.scheduler:Scheduler._roll_back",
                "if entry.num_drafts and not self.policy.reserves:",
                "if False:",
            ),
        ),
    ),
    # --- who gets a block
    Fault(
        name="shared-cached-blocks-counted-twice",
        section="B",
        sentence="The blocks of a prefix hit also count as free, so admission promises more than there is.",
        seen_in=("SGLang 35270",),
        edits=(
            Edit(
                "scheduler.scheduler:Scheduler._enter",
                "available = self.pool.num_free - sum(self.pool.references[block] == 0 for block in hit)",
                "available = self.pool.num_free",
            ),
        ),
    ),
    Fault(
        name="full-cache-raises-instead-of-evicting",
        section="B",
        sentence="When only cached blocks are left, an allocation fails although they could be evicted.",
        seen_in=("transformers 43150",),
        edits=(
            Edit(
                ALLOCATE,
                "if evicted is not None:\n",
                'if evicted is not None:\n        raise PoolError("all blocks are in use")\n',
            ),
        ),
    ),
    Fault(
        name="drafts-evict-cached-blocks",
        section="B",
        sentence="A guess that may be rejected takes the block of a cached prefix.",
        seen_in=(),
        edits=(
            Edit(
                "scheduler.memory:Memory.grow_from_unused",
                "block = self.pool.allocate_unused()",
                "block = self._allocate() if self.pool.num_free else None",
            ),
        ),
    ),
)
