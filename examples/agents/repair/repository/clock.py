"""Times of day."""


def minutes(time):
    """Return the minutes since midnight. Example: "01:30" is 90."""
    hours, rest = time.split(":")
    return int(hours) * 100 + int(rest)
