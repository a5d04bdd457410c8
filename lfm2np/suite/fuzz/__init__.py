"""Property-based tests of engines that serve: traces of many timed requests, judged by the oracle, and shrunk.

trace.py is a test case as plain data; draw_traces.py draws it (Hypothesis); play_http.py and play_engine.py play it;
finding.py judges the answers; shrink.py shrinks it; hand_over.py writes the report; campaign.py puts them together.
"""
