"""Allocates Python objects at known lines, and keeps or frees them. Everything is done once before READY.

python_objects.py PART...: prints READY and its process id, runs these parts when standard input has a byte or is closed, prints
DONE, and ends with the next byte. python_objects.py --truth FILE PART...: the same under tracemalloc, which then writes down what is
in use by line: {"LINE": [bytes, blocks], ...}.
"""
import gc
import os
import sys
import time

READ, WRITE = os.pipe()
kept = []


class Slotted:
    __slots__ = ("a", "b", "c")


class Plain:
    def __init__(self, n):
        self.number = n


def hold(value):
    kept.append(value)


def small():
    hold([Slotted() for _ in range(1000)])
    hold([Plain(n) for n in range(1000, 2000)])
    hold([bytes(100 + n % 100) for n in range(1000)])
    hold([str(n) * 20 for n in range(1000)])
    hold([bytearray(n) for n in range(1, 300)])
    hold({n: str(n) for n in range(2000)})
    hold({str(n) for n in range(700)})
    hold([(n, n, n) for n in range(500)])
    hold([lambda: None for _ in range(200)])


def freed():
    for _ in range(500):
        bytes(200)
        Slotted()
    words = [str(n) for n in range(500)]
    del words


def large():
    hold(bytes(513))
    hold([None] * 1_250_000)
    hold(bytes(10_000_000))


def grows():
    ever = []
    for n in range(5000):
        ever.append(None)
    hold(ever)
    line = bytearray()
    for n in range(600):
        line.append(1)
    hold(line)


def shrinks():
    for n in range(100):
        os.write(WRITE, b"x" * (n + 1))
        hold(os.read(READ, 65536))
    many = [None] * 100_000
    del many[10:]
    hold(many)


def nothing():
    hold([bytearray() for _ in range(100)])
    hold([[] for _ in range(100)])


def floats():
    first = [n * 0.5 for n in range(50)]
    first.clear()
    hold([n * 0.25 for n in range(50)])


def work(parts):
    for part in parts:
        globals()[part]()
        # What a part freed, and the interpreter keeps for itself, is not for the next.
        gc.collect()


def fork(parts):
    child = os.fork()
    if child == 0:
        # The links that serve a first child are made when it is reported.
        time.sleep(2)
        work(parts)
        print("CHILD", os.getpid(), flush=True)
        os.read(0, 100)
        os._exit(0)
    return child


def main(arguments):
    truth = None
    if arguments[0] == "--truth":
        truth, arguments = arguments[1], arguments[2:]
    gc.disable()
    # What is made once, such as the frames that some versions keep for each function, is made now.
    work([part for part in arguments if part != "fork"])
    kept.clear()
    gc.collect()
    print("READY", os.getpid(), flush=True)
    os.read(0, 100)
    if truth:
        import json
        import tracemalloc
    # What the interpreter keeps of freed objects for itself is given back.
    gc.collect()
    if truth:
        tracemalloc.start(1)
    if arguments[0] == "fork":
        child = fork(arguments[1:])
    else:
        child = None
        work(arguments)
    if truth:
        found = tracemalloc.take_snapshot()
        tracemalloc.stop()
        lines = {}
        for trace in found.traces:
            if trace.traceback[0].filename == __file__:
                known = lines.setdefault(trace.traceback[0].lineno, [0, 0])
                known[0] += trace.size
                known[1] += 1
        with open(truth, "w") as file:
            json.dump(lines, file)
    print("DONE", flush=True)
    os.read(0, 100)
    if child:
        os.waitpid(child, 0)


main(sys.argv[1:])
