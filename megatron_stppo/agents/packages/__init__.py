"""Agents for environments of other packages: modules for `environment.agent`, and a program that runs them.

The packages need other versions of their dependencies than tools/lock-cpu.txt has, so each is installed in a
Python environment of its own. Of megatron_stppo, the modules here import only base/types.py and
environments/base.py.
"""
