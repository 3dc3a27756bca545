"""Lists of words."""


def longest(words):
    """Return the first of the longest words, or an empty text."""
    return max(words)


def initials(words):
    """Return the first letters of the words as one text."""
    return "".join(word[0] for word in words)
