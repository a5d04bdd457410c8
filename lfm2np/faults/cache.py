"""Section B: what engines did to the paged cache and the prefix cache."""

from __future__ import annotations

from lfm2np.faults.edits import Edit, Fault, in_section
from lfm2np.faults.pool import UNGUARDED_SHARE, UNGUARDED_WRITE

# Where the edits are made.
COMMIT = "lfm2np.network.cache:commit"
PLACES = "lfm2np.network.cache:token_places"
ALLOCATE = "scheduler.block_pool:BlockPool.allocate"
ENTER = "scheduler.memory:Memory.enter"
GROW = "scheduler.memory:Memory.grow"
KEYS = "scheduler.prefix_cache:PrefixCache.keys"
PUBLISH = "scheduler.prefix_cache:PrefixCache.publish"

fault = in_section("B")

FAULTS: tuple[Fault, ...] = (
    fault(
        "attention-crosses-requests",
        "A request attends to those before it in the step: causal over the flat batch, not block by block.",
        Edit(
            "lfm2np.network.step:attend",
            "cached.append(",
            "before = [other.entries[-1] for other in segments[: segments.index(segment)]]\n"
            "            cached.append(before + ",
        ),
    ),
    # --- which content a key stands for
    fault(
        "evicted-key-still-leads-to-its-block",
        "The key of an evicted block stays in the map, so a later hit finds another request's content.",
        Edit(ALLOCATE, "del self.block_of[evicted]", "pass"),
        UNGUARDED_SHARE,
        UNGUARDED_WRITE,
        seen_in=("vLLM 4764",),
    ),
    fault(
        "parent-key-not-hashed",
        "A block's key says nothing of the blocks before it, so equal tokens anywhere are a hit.",
        Edit(KEYS, 'parent = request.block_keys[-1] if request.block_keys else b""', 'parent = b""'),
        seen_in=("vLLM 12621",),
    ),
    fault(
        "salt-not-hashed",
        "Requests with different salts find each other's blocks.",
        Edit(KEYS, "tokens, request.cache_salt", 'tokens, ""'),
        seen_in=("vLLM 44701", "vLLM 8240"),
    ),
    fault(
        "only-the-first-token-of-a-block-hashed",
        "Blocks that differ behind their first token have the same key.",
        Edit(KEYS, "[start : start + self.block_size]", "[start : start + 1]"),
        seen_in=("vLLM 12621",),
    ),
    fault(
        "keys-after-a-hit-lose-their-parent",
        "After a prefix hit the chain of keys begins anew, so what follows is never found, or for another.",
        Edit(
            KEYS,
            "request.block_keys[-1] if request.block_keys else",
            "request.block_keys[-1] if request.block_keys and not request.num_cached_tokens else",
        ),
        seen_in=("vLLM 11186",),
    ),
    fault(
        "half-filled-block-published",
        "A block of a prompt is published as soon as the first of its tokens is computed.",
        Edit(
            PUBLISH,
            "request.num_computed_tokens // self.block_size\n",
            "request.num_computed_tokens // self.block_size\n"
            "    begun = -(-request.num_computed_tokens // self.block_size)\n"
            "    last = min(begun, request.num_tokens // self.block_size)\n",
        ),
        UNGUARDED_WRITE,
        seen_in=("SGLang 38319",),
    ),
    # --- what a hit gives
    fault(
        "fully-cached-prompt-leaves-nothing-to-compute",
        "A prompt all of whose blocks are cached is scheduled with zero tokens, so nothing samples.",
        Edit(
            "scheduler.prefix_cache:PrefixCache.find",
            "most = request.first_logits // self.block_size",
            "most = (request.first_logits + 1) // self.block_size",
        ),
        seen_in=("vLLM 3239",),
    ),
    fault(
        "cached-tokens-not-counted",
        "A request's count of cached tokens stays 0 after a prefix hit.",
        Edit(ENTER, "request.num_cached_tokens += request.num_computed_tokens", "pass"),
        seen_in=("vLLM 17305",),
    ),
    fault(
        "hit-blocks-omitted-from-the-plan",
        "In the step of a prefix hit the block table names block 0 in the place of the cached blocks.",
        Edit(
            "scheduler.scheduler:Scheduler._schedule",
            "block_table=table,",
            "block_table=(0,) * (start // size) + table[start // size :]\n"
            "        if request.request_id in step.admitted else table,",
        ),
        seen_in=("ssd 23",),
    ),
    fault(
        "last-block-of-a-hit-dropped",
        "The last block of a prefix hit counts as computed, but the table has a new block in its place.",
        Edit(
            ENTER,
            "for block in hit:\n"
            "        self.pool.share(block)\n"
            "    request.block_table = (*hit, *(self._allocate() for _ in range(needed)))",
            "for block in hit[:-1]:\n"
            "        self.pool.share(block)\n"
            "    request.block_table = (*hit[:-1], *(self._allocate() for _ in range(needed + bool(hit))))",
        ),
        seen_in=("ssd 23",),
    ),
    fault(
        "checkpoint-of-another-block-restored",
        "A prefix hit starts from the state after its first block, not after its last one.",
        Edit(ENTER, 'Move("restore_state", hit[-1]', 'Move("restore_state", hit[0]'),
        seen_in=("vLLM 43090", "vLLM 47861", "vLLM 53912"),
    ),
    fault(
        "prefill-restarts-at-0-over-cached-blocks",
        "After a prefix hit the prompt is computed from its beginning, into the shared blocks.",
        Edit(ENTER, "request.num_computed_tokens = len(hit) * self.block_size", "request.num_computed_tokens = 0"),
        UNGUARDED_WRITE,
        seen_in=("ferrox 37",),
    ),
    # --- where a token lies
    fault(
        "half-the-block-size-used-for-offsets",
        "A token's place within its block is counted in blocks of half the size.",
        Edit(PLACES, "positions % cache.block_size", "positions % max(1, cache.block_size // 2)"),
        seen_in=("vLLM 27547",),
    ),
    fault(
        "one-block-more-than-needed",
        "A sequence that fills its last block gets one block more.",
        Edit(
            "scheduler.memory:Memory.blocks_for",
            "-(-num_tokens // self.block_size)",
            "num_tokens // self.block_size + 1",
        ),
        seen_in=("pegainfer 291",),
    ),
    fault(
        "old-content-of-a-cell-is-read",
        "Attention reads for a step's first token what the last owner of its block left there.",
        Edit(
            "lfm2np.network.cache:read_tokens",
            "return [*parts, entries]",
            "held = [np.concatenate([array[run] for run in runs]) for array in cache.blocks[layer]]\n"
            "    old = tuple(array.reshape(-1, *array.shape[2:])[: start + 1] for array in held)\n"
            "    return [old, tuple(new[1:] for new in entries)]",
        ),
        seen_in=("vllm-mlx 380",),
    ),
    fault(
        "rejected-drafts-stay-in-the-blocks",
        "When drafts are rejected, their keys and values stand where those of the accepted tokens belong.",
        Edit(
            COMMIT,
            "segment.entries[index][number][: segment.count]",
            "segment.entries[index][number][len(segment.entry.token_ids) - segment.count :]",
        ),
        seen_in=("vLLM 39273",),
    ),
    # --- copies
    fault(
        "shared-block-written-without-a-copy",
        "A sample that shares a half-filled block writes its next token into it, and so into its siblings'.",
        Edit(GROW, "shared = first < len(table) and self.pool.is_shared(table[first])", "shared = False"),
        UNGUARDED_WRITE,
        seen_in=("vLLM 417", "xLLM 1984"),
    ),
    fault(
        "copy-on-write-copies-the-first-block",
        "The copy of a shared block gets the content of the sequence's first block.",
        Edit(GROW, 'Move("copy_block", table[first], copy)', 'Move("copy_block", table[0], copy)'),
        seen_in=("vLLM 417", "xLLM 1984"),
    ),
    fault(
        "swapped-blocks-come-back-in-reverse",
        "The blocks of a request that is swapped in are loaded last first.",
        Edit(ENTER, "zip(request.host_blocks,", "zip(request.host_blocks[::-1],"),
    ),
)
