"""Property-based tests of engines that serve: traces of many timed requests, judged by the oracle, and shrunk.

trace.py is what is tried, as plain data; draw.py draws it (Hypothesis); play_http.py and play_engine.py carry it out;
found.py judges what came back; shrink.py makes it small; hand_over.py writes what an author gets. campaign.py puts them
together.
"""
