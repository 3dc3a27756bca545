"""Prices in cents."""


def total(prices):
    """Return the sum of the prices, without 10 % if it is 100 or more."""
    due = sum(prices)
    if due > 100:
        due -= due // 10
    return due
