"""Allocates byte arrays in greenlets, and writes down the Python stack of each.

python_greenlets.py TRUTH: as python_truth.py.
"""
import json
import os
import sys
import threading
import time

import greenlet

truth = []
# Functions outlive their run, so that their names can be read.
kept = []
lock = threading.Lock()


def leaf():
    """Allocates an array of a size of its own, in a function of its own: so each stack is of one array."""
    with lock:
        leaf.last += 1009
        n = leaf.last
    space = {"note": note, "sys": sys, "n": n}
    exec(f"def leaf_{n}():\n    note(n, sys._getframe()), bytearray(n)\n", space)
    kept.append(space)
    space[f"leaf_{n}"]()


leaf.last = 200_003


def note(requested, frame):
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append([getattr(code, "co_qualname", code.co_name), code.co_filename, frame.f_lineno])
        frame = frame.f_back
    with lock:
        truth.append({"bytes": requested + 1, "frames": frames})


class Through:
    """Calls that go through C, so that each has an invocation of the interpreter's loop of its own."""

    def __init__(self, depth, then):
        self.depth = depth
        self.then = then

    def __lt__(self, other):
        deeper(self.depth - 1, self.then)
        return True


def deeper(depth, then):
    if depth == 0:
        return then()
    sorted([Through(depth, then), Through(depth, then)])


def worker(depth):
    """Allocates at several depths, and goes back to whoever has started it in between."""
    leaf()
    for _ in range(3):
        deeper(depth, leaf)
        deeper(depth, greenlet.getcurrent().parent.switch)
        leaf()


def plain():
    leaf()
    deeper(3, leaf)


def workers():
    """Greenlets that begin at one depth, and go on while the one that began them is at others."""
    all_workers = [greenlet.greenlet(worker) for _ in range(4)]
    for depth, one in enumerate(all_workers):
        deeper(depth, lambda: one.switch(3 - depth))
        leaf()
    while any(not one.dead for one in all_workers):
        for depth, one in enumerate(all_workers):
            if not one.dead:
                deeper(3 - depth, one.switch)
                deeper(depth, leaf)


def nested():
    """A greenlet that begins another one."""
    inner = greenlet.greenlet(lambda: (leaf(), deeper(2, leaf)))
    outer = greenlet.greenlet(lambda: (leaf(), deeper(1, inner.switch), leaf()))
    deeper(2, outer.switch)


def generator():
    for _ in range(3):
        leaf()
        yield greenlet.getcurrent().parent.switch()


def generators():
    one = greenlet.greenlet(lambda: list(generator()))
    while not one.dead:
        one.switch()
        leaf()


def run(path):
    for part in [plain, workers, nested, generators]:
        part()
    thread = threading.Thread(target=workers)
    thread.start()
    thread.join()
    plain()
    with open(path, "w") as file:
        json.dump(truth, file)
    # Line tables too long to be copied with a sample are read from a process that still runs.
    time.sleep(0.5)


if __name__ == "__main__":
    os.write(1, b"READY %d\n" % os.getpid())
    os.read(0, 1)
    run(sys.argv[1])
