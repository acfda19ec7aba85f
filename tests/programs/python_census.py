"""A known population: 3,000 sessions with attributes, 2,000 baskets with slots, 1,000 notes of 1,000 letters."""
import os
import sys


class Session:
    def __init__(self, number):
        self.number = number


class Basket:
    __slots__ = ("goods",)


sessions = [Session(k) for k in range(4000)]
del sessions[::4]
baskets = [Basket() for _ in range(2000)]
notes = [bytes(1000) for _ in range(1000)]
print("READY", os.getpid(), flush=True)
sys.stdin.readline()
