"""What the errors of a check depend on: factors and their cuts (scales), what tells wrong from right (regions), ways of
reporting that are not the asked one (replies), constants that are a little off (constants), and the first cause in
words (findings).
"""
