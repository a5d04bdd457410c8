"""Continuous batching: requests in, steps, outputs; and what a batched run has to equal. To be read after
lfm2np/teaching/nano.py, in this order (nano's names: content and hash_of are a block's key, block_states checkpoints, a
Chunk is ScheduledTokens with a Segment):

    scheduler/step.py       fill: who continues, who is preempted, who is admitted; queues.py, policy.py beside it
    scheduler/memory.py     what a request holds: a slot, and blocks of each group (groups.py, prefix_cache.py)
    cache.py, step.py       the arrays behind it; one forward pass over all tokens of a plan
    sequence.py, sampler.py what the engine knows of a request; what a step gives it
    engine.py               Engine._step: how they meet

How a preempted request whose prefix is shared gets its state back: step.commit_step writes a checkpoint of the states
behind each block that a step fills, and Scheduler.update then publishes the block under its key. (If another block has
this content already, that one is found; its twin takes over when it is handed out anew.) Queues.preempt gives slot and
blocks back, and what is published stays to be found until its block is handed out anew. When the request is admitted
again, Step.fill asks PrefixCache.find for the longest prefix, of prompt and output, that is still there. Memory.enter
shares these blocks, gives it any free slot, and plans a move: `restore_state`, from the checkpoint that the hit's last
block carries, to the slot. cache.move copies it before forward() computes the tokens behind the hit; without a hit the
slot is zeroed.

Beside these: draft_model.py (ModelDrafter); generation.py (one greedy prompt); sequential.py computes each request
alone; lfm2np/suite/audit.py says what the cache must then hold.
"""
