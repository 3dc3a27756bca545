"""Agents for environments of other packages: modules for `environment.agent`, and a program that runs them.

The packages need other versions of their dependencies than tools/lock-cpu.txt has, so each is installed in a
Python environment of its own. Nothing here imports more of megatron_stppo than types.py.
"""
