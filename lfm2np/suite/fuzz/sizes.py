"""Numbers of a run that the command's help shows, too, which needs no NumPy."""

BLOCK, CHUNK, SLOTS = 16, 64, 8  # assumed: of vLLM, SGLang and small engines; longer requests cross draw_traces.FAR
EXAMPLES, REPLAYS = 200, 10  # of a run; of a trace that is named
LEAST_CONTEXT = 4  # tokens: a BOS, a token, and an answer to it, with one to spare
GENERATING = ("examples", "findings", "minutes", "seed")  # options about traces that are generated
