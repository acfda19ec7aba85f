"""Makes and drops objects on demand, for measuring what one costs; nothing else allocates. Speaks as pair_loop.c does."""
import os
import sys
import time


def churn(pairs, size):
    for _ in range(pairs):
        bytes(size)


print("READY", os.getpid(), flush=True)
for line in sys.stdin:
    _, pairs, size = line.split()
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    churn(int(pairs), int(size))
    cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
    print(wall, cpu, flush=True)
