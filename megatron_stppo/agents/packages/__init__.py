"""A program that runs an agent function in a Python environment of its own.

The packages of agents need other versions of their dependencies than tools/lock-cpu.txt has. Of
megatron_stppo, this package imports only base/types.py and environments/base.py.
"""
