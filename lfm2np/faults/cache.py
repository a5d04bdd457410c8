"""Section B: what engines did to the paged cache and the prefix cache."""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Fault
from lfm2np.faults.pool import UNGUARDED_SHARE, UNGUARDED_WRITE

# Where the edits are made.
COMMIT = "lfm2np.network.cache:commit"
PLACES = "lfm2np.network.cache:token_places"
ALLOCATE = "scheduler.block_pool:BlockPool.allocate"
ENTER = "scheduler.memory:Memory.enter"
GROW = "scheduler.memory:Memory.grow"
KEYS = "scheduler.prefix_cache:PrefixCache.keys"
PUBLISH = "scheduler.prefix_cache:PrefixCache.publish"

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="attention-crosses-requests",
        section="B",
        sentence="A request attends to those before it in the step: causal over the flat batch, not block by block.",
        seen_in=(),
        edits=(
            Edit(
                "lfm2np.network.step:attend",
                "cached.append(",
                "before = [other.entries[-1] for other in segments[: segments.index(segment)]]\n"
                "            cached.append(before + ",
            ),
        ),
    ),
    # --- which content a key stands for
    Fault(
        name="evicted-key-still-leads-to-its-block",
        section="B",
        sentence="The key of an evicted block stays in the map, so a later hit finds another request's content.",
        seen_in=("vLLM 4764",),
        edits=(Edit(ALLOCATE, "del self.block_of[evicted]", "pass"), UNGUARDED_SHARE, UNGUARDED_WRITE),
    ),
    Fault(
        name="parent-key-not-hashed",
        section="B",
        sentence="A block's key says nothing of the blocks before it, so equal tokens anywhere are a hit.",
        seen_in=("vLLM 12621",),
        edits=(Edit(KEYS, 'parent = request.block_keys[-1] if request.block_keys else b""', 'parent = b""'),),
    ),
    Fault(
        name="salt-not-hashed",
        section="B",
        sentence="Requests with different salts find each other's blocks.",
        seen_in=("vLLM 44701", "vLLM 8240"),
        edits=(Edit(KEYS, "tokens, request.cache_salt", 'tokens, ""'),),
    ),
    Fault(
        name="only-the-first-token-of-a-block-hashed",
        section="B",
        sentence="Blocks that differ behind their first token have the same key.",
        seen_in=("vLLM 12621",),
        edits=(Edit(KEYS, "[start : start + self.block_size]", "[start : start + 1]"),),
    ),
    Fault(
        name="keys-after-a-hit-lose-their-parent",
        section="B",
        sentence="After a prefix hit the chain of keys begins anew, so what follows is never found, or for another.",
        seen_in=("vLLM 11186",),
        edits=(
            Edit(
                KEYS,
                "request.block_keys[-1] if request.block_keys else",
                "request.block_keys[-1] if request.block_keys and not request.num_cached_tokens else",
            ),
        ),
    ),
    Fault(
        name="half-filled-block-published",
        section="B",
        sentence="A block of a prompt is published as soon as the first of its tokens is computed.",
        seen_in=("SGLang 38319",),
        edits=(
            Edit(
                PUBLISH,
                "request.num_computed_tokens // self.block_size\n",
                "request.num_computed_tokens // self.block_size\n"
                "    begun = -(-request.num_computed_tokens // self.block_size)\n"
                "    last = min(begun, request.num_tokens // self.block_size)\n",
            ),
            UNGUARDED_WRITE,
        ),
    ),
    # --- what a hit gives
    Fault(
        name="fully-cached-prompt-leaves-nothing-to-compute",
        section="B",
        sentence="A prompt all of whose blocks are cached is scheduled with zero tokens, so nothing samples.",
        seen_in=("vLLM 3239",),
        edits=(
            Edit(
                "scheduler.prefix_cache:PrefixCache.find",
                "most = request.first_logits // self.block_size",
                "most = (request.first_logits + 1) // self.block_size",
            ),
        ),
    ),
    Fault(
        name="cached-tokens-not-counted",
        section="B",
        sentence="A request's count of cached tokens stays 0 after a prefix hit.",
        seen_in=("vLLM 17305",),
        edits=(Edit(ENTER, "request.num_cached_tokens += request.num_computed_tokens", "pass"),),
    ),
    Fault(
        name="hit-blocks-omitted-from-the-plan",
        section="B",
        sentence="In the step of a prefix hit the block table names block 0 in the place of the cached blocks.",
        seen_in=("ssd 23",),
        edits=(
            Edit(
                "scheduler.scheduler:Scheduler._schedule",
                "block_table=table,",
                "block_table=(0,) * (start // size) + table[start // size :]\n"
                "        if request.request_id in step.admitted else table,",
            ),
        ),
    ),
    Fault(
        name="last-block-of-a-hit-dropped",
        section="B",
        sentence="The last block of a prefix hit counts as computed, but the table has a new block in its place.",
        seen_in=("ssd 23",),
        edits=(
            Edit(
                ENTER,
                "for block in hit:\n"
                "        self.pool.share(block)\n"
                "    request.block_table = (*hit, *(self._allocate() for _ in range(needed)))",
                "for block in hit[:-1]:\n"
                "        self.pool.share(block)\n"
                "    request.block_table = (*hit[:-1], *(self._allocate() for _ in range(needed + bool(hit))))",
            ),
        ),
    ),
    Fault(
        name="checkpoint-of-another-block-restored",
        section="B",
        sentence="A prefix hit starts from the state after its first block, not after its last one.",
        seen_in=("vLLM 43090", "vLLM 47861", "vLLM 53912"),
        edits=(Edit(ENTER, 'Move("restore_state", hit[-1]', 'Move("restore_state", hit[0]'),),
    ),
    Fault(
        name="prefill-restarts-at-0-over-cached-blocks",
        section="B",
        sentence="After a prefix hit the prompt is computed from its beginning, into the shared blocks.",
        seen_in=("ferrox 37",),
        edits=(
            Edit(ENTER, "request.num_computed_tokens = len(hit) * self.block_size", "request.num_computed_tokens = 0"),
            UNGUARDED_WRITE,
        ),
    ),
    # --- where a token lies
    Fault(
        name="half-the-block-size-used-for-offsets",
        section="B",
        sentence="A token's place within its block is counted in blocks of half the size.",
        seen_in=("vLLM 27547",),
        edits=(Edit(PLACES, "positions % cache.block_size", "positions % max(1, cache.block_size // 2)"),),
    ),
    Fault(
        name="one-block-more-than-needed",
        section="B",
        sentence="A sequence that fills its last block gets one block more.",
        seen_in=("pegainfer 291",),
        edits=(
            Edit(
                "scheduler.memory:Memory.blocks_for",
                "-(-num_tokens // self.block_size)",
                "num_tokens // self.block_size + 1",
            ),
        ),
    ),
    Fault(
        name="old-content-of-a-cell-is-read",
        section="B",
        sentence="Attention reads for a step's first token what the last owner of its block left there.",
        seen_in=("vllm-mlx 380",),
        edits=(
            Edit(
                "lfm2np.network.cache:read_tokens",
                "return [*parts, entries]",
                "held = [np.concatenate([array[run] for run in runs]) for array in cache.blocks[layer]]\n"
                "    old = tuple(array.reshape(-1, *array.shape[2:])[: start + 1] for array in held)\n"
                "    return [old, tuple(new[1:] for new in entries)]",
            ),
        ),
    ),
    Fault(
        name="rejected-drafts-stay-in-the-blocks",
        section="B",
        sentence="When drafts are rejected, their keys and values stand where those of the accepted tokens belong.",
        seen_in=("vLLM 39273",),
        edits=(
            Edit(
                COMMIT,
                "segment.entries[index][number][: segment.count]",
                "segment.entries[index][number][len(segment.entry.token_ids) - segment.count :]",
            ),
        ),
    ),
    # --- copies
    Fault(
        name="shared-block-written-without-a-copy",
        section="B",
        sentence="A sample that shares a half-filled block writes its next token into it, and so into its siblings'.",
        seen_in=("vLLM 417", "xLLM 1984"),
        edits=(
            Edit(GROW, "shared = first < len(table) and self.pool.is_shared(table[first])", "shared = False"),
            UNGUARDED_WRITE,
        ),
    ),
    Fault(
        name="copy-on-write-copies-the-first-block",
        section="B",
        sentence="The copy of a shared block gets the content of the sequence's first block.",
        seen_in=("vLLM 417", "xLLM 1984"),
        edits=(Edit(GROW, 'Move("copy_block", table[first], copy)', 'Move("copy_block", table[0], copy)'),),
    ),
    Fault(
        name="swapped-blocks-come-back-in-reverse",
        section="B",
        sentence="The blocks of a request that is swapped in are loaded last first.",
        seen_in=(),
        edits=(Edit(ENTER, "zip(request.host_blocks,", "zip(request.host_blocks[::-1],"),),
    ),
)
