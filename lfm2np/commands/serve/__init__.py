"""`lfm2np serve`: the engine behind OpenAI's protocol. One thread steps it; an event loop speaks HTTP.

    body -> bodies (form) -> jobs (tokens, sampling) -> desk -> runner: engine -> desk -> answers -> reply or stream

Needs the extra `serve`, but for extra.py.
"""
