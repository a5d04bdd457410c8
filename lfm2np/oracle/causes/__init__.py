"""What the errors of a check depend on: tags of positions (tags), the split of wrong from right ones by one of them
(split), errors by a tag's levels (groups), ways of reporting other than the requested one (replies), wrong constants
and a label read otherwise (wrong_constants), and the first cause in words (findings).
"""
