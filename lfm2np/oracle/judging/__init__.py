"""From what an engine said to judged positions: each token held against the exact network, by the noise of a format.

emulate.py has the formats, and engines of one that could be; noise.py what they err by at each token of a sequence;
routes.py the experts that tokens went to; verdict.py the verdict on one position, and how likely so many are; judge.py
puts it together. The rest of oracle/ may import it; of that it imports oracle/targets/ only, whose records it judges.
"""
