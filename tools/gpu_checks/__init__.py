"""The checks of tools/check_gpu.py that run in a Python process of their own.

A check is a function without arguments that returns its results as a dict for JSON and raises an error if
something is wrong. Every check runs on a GPU and, with smaller sizes, on a CPU.
"""
