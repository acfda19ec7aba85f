"""Allocates byte arrays from known Python stacks, and writes down each stack with the size of its array.

python_truth.py TRUTH PART...: runs these parts, then writes TRUTH, a JSON list of {"bytes": N, "frames": [[function,
file, line], ...]}, innermost frame first. Each array has a size of its own. Prints READY and its process id, and begins
when standard input has a byte, or is closed.
"""
import _thread
import asyncio
import ctypes
import functools
import json
import os
import re
import sys
import threading
import time

truth = []
lock = threading.Lock()
HAS_QUALIFIED_NAMES = sys.version_info >= (3, 11)


def size():
    """The next size: no sum of few sizes is one of the others."""
    with lock:
        size.last += 1009
        return size.last


size.last = 200_003


def note(requested, frame):
    """Notes the stack of an array of so many bytes. The interpreter asks for one byte more than that."""
    frames = []
    while frame is not None:
        code = frame.f_code
        name = code.co_qualname if HAS_QUALIFIED_NAMES else code.co_name
        frames.append([name, code.co_filename, frame.f_lineno])
        frame = frame.f_back
    with lock:
        truth.append({"bytes": requested + 1, "frames": frames})


def leaf():
    n = size()
    note(n, sys._getframe()), bytearray(n)


def plain():
    leaf()
    n = size()
    note(n, sys._getframe()), bytearray(n)


def recursion(depth):
    if depth == 0:
        return leaf()
    return recursion(depth - 1)


class Shape:
    class Inner:
        def __init__(self):
            leaf()

        def __del__(self):
            leaf()

        def __call__(self, *arguments, **named):
            leaf()
            return 1

        def __lt__(self, other):
            leaf()
            return True

        def __getattr__(self, name):
            leaf()
            return name

        @property
        def value(self):
            leaf()
            return 1

        @staticmethod
        def fixed(first=leaf):
            first()

        @classmethod
        def of_class(cls, *rest, key=None):
            leaf()


def classes():
    shape = Shape.Inner()
    shape(1, 2, three=3)
    shape.value
    shape.anything
    Shape.Inner.fixed()
    Shape.Inner.of_class(1, 2, key=3)
    other = Shape.Inner()
    min([shape, other])
    del other


def closures():
    outer = size()

    def inside(times):
        nonlocal outer
        outer += 1
        leaf()
        return [leaf() for _ in range(times)], {i: leaf() for i in range(times)}, (lambda: leaf())()

    inside(1)
    functools.partial(inside, 1)()
    functools.lru_cache()(inside)(1)


def numbers(depth):
    leaf()
    yield depth
    if depth:
        yield from numbers(depth - 1)
    leaf()
    sent = yield depth
    leaf()


def generators():
    for _ in numbers(2):
        leaf()
    one = numbers(0)
    next(one)
    next(one)
    try:
        one.throw(KeyError("thrown in"))
    except KeyError:
        leaf()
    list(leaf() for _ in range(1))
    sum(1 for _ in map(lambda _: leaf(), range(1)))
    abandoned = closing()
    next(abandoned)
    abandoned.close()


def closing():
    try:
        yield 1
    finally:
        leaf()


async def awaited(depth):
    leaf()
    await asyncio.sleep(0)
    leaf()
    if depth:
        await awaited(depth - 1)


class Managed:
    async def __aenter__(self):
        leaf()

    async def __aexit__(self, *_):
        await asyncio.sleep(0)
        leaf()


async def stream():
    for number in range(2):
        await asyncio.sleep(0)
        yield number
    leaf()


async def main():
    async with Managed():
        await asyncio.gather(awaited(2), awaited(0))
    async for _ in stream():
        leaf()


def coroutines():
    asyncio.new_event_loop().run_until_complete(main())


def fails(depth):
    if depth == 0:
        raise ValueError("on purpose")
    try:
        fails(depth - 1)
    finally:
        leaf()


def exceptions():
    try:
        fails(2)
    except ValueError:
        leaf()
    with open(os.devnull):
        leaf()
    try:
        try:
            fails(0)
        except ValueError as error:
            raise KeyError("another") from error
    except KeyError:
        leaf()


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def compare(a, b):
    leaf()
    return 0


def extensions():
    """C code between Python functions: of the interpreter, of its modules, and of the C library."""
    sorted([2, 1], key=lambda value: leaf() or value)
    list(map(lambda _: leaf(), range(1)))
    functools.reduce(lambda a, b: leaf(), [1, 2])
    re.sub("a", lambda match: leaf() or "b", "a")
    json.dumps(Shape.Inner, default=lambda value: leaf() or 1)
    exec(compile("leaf()", "<made at run time>", "exec"), globals())
    eval(compile("leaf()", "<expression>", "eval"))
    library = ctypes.CDLL(None)
    values = (ctypes.c_int * 2)(2, 1)
    library.qsort(values, ctypes.c_size_t(2), ctypes.c_size_t(4), compare)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*arguments):
        leaf()
        return function(*arguments)

    return wrapper


# fmt: off
@decorated
def long_statements(
    value,
):
    first = (
        leaf(),
        value,
        leaf(),
    )
    return [
        first,
        leaf()
        if value
        else None,
    ]
# fmt: on


def lines():
    long_statements(1)
    # More than the lines that a table of an old version takes in one step, backwards, too.
    source = "\n" * 500 + "def far():\n    leaf(); (leaf(),\n" + "\n" * 300 + "  leaf())\n"
    space = {"leaf": leaf}
    exec(compile(source, "/far away/caf\u00e9 \U0001f40d.py", "exec"), space)
    space["far"]()


def in_thread(number):
    recursion(number)
    for _ in numbers(1):
        leaf()


def threads():
    workers = [threading.Thread(target=in_thread, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    done = _thread.allocate_lock()
    done.acquire()
    _thread.start_new_thread(lambda: (leaf(), done.release()), ())
    done.acquire()


def deep():
    """Many frames, but fewer than are read of a native stack."""
    recursion(100)


def gone():
    """Code that is gone as soon as it has run, and whose place the next takes."""
    for number in range(20):
        exec(compile("leaf()", "<gone %d>" % number, "exec"), globals())


PARTS = [plain, classes, closures, generators, coroutines, exceptions, extensions, lines, threads, gone, deep]


def run(path, parts):
    recursion(3)
    for part in PARTS:
        if not parts or part.__name__ in parts:
            part()
    with open(path, "w") as file:
        json.dump(truth, file)
    # Line tables too long to be copied with a sample are read from a process that still runs.
    time.sleep(0.5)


if __name__ == "__main__":
    os.write(1, b"READY %d\n" % os.getpid())
    os.read(0, 1)
    if "fork" in sys.argv[2:]:
        # Two workers, as servers make them.
        for worker in range(2):
            child = os.fork()
            if child == 0:
                # What the first child of a process does at once may not be counted yet.
                time.sleep(2)
                size.last += 5_000_000 * (worker + 1)
                run(f"{sys.argv[1]}.{worker}", ["plain", "threads", "generators"])
                os._exit(0)
            os.waitpid(child, 0)
    run(sys.argv[1], sys.argv[2:])
