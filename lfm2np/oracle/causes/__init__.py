"""What the errors of a check depend on: tags of positions (tags), the split of wrong from right ones by one of them
(split), errors by a tag's levels (groups), ways of reporting other than the requested one (replies), what is wrong
everywhere (everywhere), and the first cause in words (findings).
"""
