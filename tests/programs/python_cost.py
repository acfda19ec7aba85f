"""MODE [NUMBER]: what Python stacks cost. Reads lines, and prints for each the CPU time of the work in nanoseconds per allocation.

depth      a line is the number of calls below which 20,000 blocks are allocated and freed
functions  any line calls NUMBER different functions, each of which keeps a block
"""
import os
import sys
import time

ALLOCATIONS = 20_000
# Python's own allocator passes on what is larger than 512 bytes.
SIZE = 5_000


def work():
    for _ in range(ALLOCATIONS):
        bytes(SIZE)


def down(calls):
    if calls:
        down(calls - 1)
    else:
        work()


def make(number):
    made = {}
    for i in range(number):
        exec(f"def function_{i}(kept):\n    kept.append(bytes({SIZE}))\n", made)
    return [made[f"function_{i}"] for i in range(number)]


def main():
    functions = make(int(sys.argv[2])) if sys.argv[1] == "functions" else []
    kept = []
    sys.setrecursionlimit(10_000)
    print("READY", os.getpid(), flush=True)
    for line in sys.stdin:
        began = time.process_time_ns()
        if functions:
            for i, function in enumerate(functions):
                function(kept)
                # At full speed, samples would be lost.
                if i % 20 == 0:
                    time.sleep(0.001)
        else:
            down(int(line))
        spent = time.process_time_ns() - began
        print(spent / (len(functions) or ALLOCATIONS), flush=True)


main()
