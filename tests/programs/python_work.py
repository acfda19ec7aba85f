"""Allocates in ways that Python programs do, in functions of their own: numpy, text, JSON, compression, containers, objects.

Prints READY and its process id, waits for a line, works, and waits for another line. Blocks of up to 512 bytes are few: they
come from Python's own heap, which not every profiler sees.
"""
import json
import os
import sys
import zlib

import numpy

kept = []


def zeros(i):
    return numpy.zeros(20_000 + i)


def arange(_):
    return numpy.arange(30_000)


def concatenated(i):
    first, second = zeros(i), arange(i)
    return numpy.concatenate([first, second])


def in_order(i):
    return numpy.sort(concatenated(i))


def text(i):
    return "x" * 50_000 + str(i)


def joined(_):
    return "".join(text(k)[:2000] for k in range(20))


def dumped(_):
    return json.dumps([{"key%d" % k: "v" * 700} for k in range(50)])


def loaded(i):
    return json.loads(dumped(i))


def packed(_):
    return zlib.compress(bytes(range(256)) * 400)


def squares(_):
    return [k * k for k in range(5000)]


def inverse(_):
    return {k: k for k in range(3000)}


class Node:
    def __init__(self, i):
        self.data = bytearray(9_000 + i)


def nodes(_):
    return [Node(k) for k in range(10)]


print("READY", os.getpid(), flush=True)
sys.stdin.readline()
for i in range(100):
    for function in (in_order, joined, loaded, packed, squares, inverse, nodes):
        value = function(i)
        if i % 50 == 0:
            kept.append(value)
sys.stdin.readline()
