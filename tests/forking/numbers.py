"""A program that prints numbers: random ones, and those that torch computes on several threads."""

import json
import os
import random

import numpy
import torch


def main() -> None:
    """Print [random numbers of this process, results of torch, which are the same in all processes]."""
    threads = len(os.listdir("/proc/self/task"))
    x = torch.arange(512 * 512, dtype=torch.float32).reshape(512, 512).sin()
    sums = [float((x @ x).sum()), float(torch.nn.functional.gelu(x).sum())]
    more = len(os.listdir("/proc/self/task")) > threads
    own = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
    print(json.dumps([own, [sums, more, torch.get_num_threads()]]))


if __name__ == "__main__":
    main()
