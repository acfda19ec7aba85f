"""Turns records into JSON text and back, over and over, and keeps some of them: what a small service does."""
import json
import os
import sys

rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
waits = "FREE_RUNNING" not in os.environ
if waits:
    os.write(1, b"READY %d\n" % os.getpid())
    os.read(0, 100)
kept = []
for number in range(rounds):
    record = {"number": number, "text": "x" * (number % 977), "list": list(range(number % 53)), "nested": {"a": {"b": [number] * 7}}}
    text = json.dumps([record] * 20)
    kept.append(json.loads(text))
    if len(kept) > 50:
        kept = kept[25:]
if waits:
    os.write(1, b"{}\n")
    os.read(0, 100)
