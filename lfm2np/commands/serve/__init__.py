"""`lfm2np serve`: the engine behind OpenAI's protocol. One thread steps it; an event loop speaks HTTP.

    body -> bodies (form) -> jobs (tokens, sampling) -> engine_thread -> answers -> reply or stream (app)

Needs the extra `serve`, but for extra.py.
"""
