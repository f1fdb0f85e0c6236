"""The parts of a variation: what it is made of (`original`), other columns (`columns`), values (`values`),
directions and functions (`directions`), and the words of its question (`question`).
"""
