"""Agents over other packages: modules for `environment.agent`, and the program that runs one as a command.

The packages need other versions of their dependencies than tools/lock-cpu.txt has, so each is installed in a
Python environment of its own. Nothing here imports more of megatron_stppo than types.py.
"""
