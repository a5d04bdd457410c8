"""Property-based tests of engines that serve: traces of many timed requests, judged by the oracle, and shrunk.

draw_traces.py draws traces; trace.py makes them of others; watched.py plays them on a server; judge.py
judges the answers; shrink.py shrinks a trace; campaign.py puts these together; hand_over.py writes what was found.
"""
