"""What the errors of a check depend on: factors and their cuts (scales), regions that separate wrong from right
(regions), ways of reporting other than the requested one (replies), wrong constants and a label read otherwise
(wrong_constants), and the first cause in words (findings).
"""
