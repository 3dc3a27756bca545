"""Ranks, deadlines, preemption."""
