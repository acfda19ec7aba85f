"""A real workload, the same in each run: JSON, SQLite, regular expressions, strings; hundreds of stacks in the
interpreter and its libraries. Ends without tidying up, so that what it kept is still in use.

work.py LEAK: LEAK more byte arrays of 100 bytes than usual are kept (they allocate through PyByteArray_*)."""
import json
import os
import re
import sqlite3
import sys

kept = []


def documents():
    for i in range(400):
        text = json.dumps(
            {"list": list(range(i % 150)), "text": "x" * (i % 997), "map": {str(k): k for k in range(i % 20)}}
        )
        value = json.loads(text)
        if i % 10 == 0:
            kept.append(value)


def table():
    base = sqlite3.connect(":memory:")
    base.execute("create table t (a integer primary key, b text, c real)")
    rows = (("y" * (i % 300), i / 7) for i in range(2000))
    base.executemany("insert into t (b, c) values (?, ?)", rows)
    base.execute("create index i on t (b)")
    kept.extend(base.execute("select b, count(*), sum(c) from t group by b order by 2 desc"))
    kept.append(base)


def words():
    text = " ".join(f"w{i % 700}" for i in range(20000))
    counts = {}
    for word in re.findall(r"\w+", text):
        counts[word] = counts.get(word, 0) + 1
    kept.append(sorted(counts.items()))
    kept.append([re.sub(r"w(\d)", r"v\1", word) for word in counts])


def cache(entries):
    for _ in range(entries):
        kept.append(bytearray(100))


documents()
table()
words()
cache(500 + int(sys.argv[1]))
os._exit(0)
