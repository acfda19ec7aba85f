"""LIBRARY ROUNDS SIZE: calls a library that rewrites the state of the calling thread, its innermost frame and code object, and the table
of the object allocator while it allocates, ROUNDS times, with and without the interpreter's lock. Prints READY and its pid, works after
a line, prints the number of blocks, and ends at the next line."""
import ctypes
import os
import sys

library, rounds, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
WORD = ctypes.c_uint64


class Allocator(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("context", "malloc", "calloc", "realloc", "free")]


def address_of_frame(frame):
    """Of what the interpreter keeps for itself: a frame object has it in its fourth word."""
    return WORD.from_address(id(frame) + 24).value


def tables():
    """Addresses of what has the functions of the object allocator, in the interpreter's writable data."""
    allocator = Allocator()
    ctypes.pythonapi.PyMem_GetAllocator(2, ctypes.byref(allocator))
    found = []
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps]
    for fields in lines:
        if fields[1].startswith("rw") and len(fields) > 5 and "python" in os.path.basename(fields[5]):
            start, end = (int(digits, 16) for digits in fields[0].split("-"))
            at = ctypes.string_at(start, end - start).find(bytes(allocator))
            if at >= 0:
                found.append(start + at)
    return found


def scribble(function, seed, tables):
    state = ctypes.pythonapi.PyThreadState_Get
    state.restype = ctypes.c_void_p
    frame = sys._getframe()
    # The counts of references and the types of objects stay.
    code = id(frame.f_code) + 16
    places = [state() + 16, address_of_frame(frame), code] + tables
    words = [20, 9, 20] + [5] * len(tables)
    count = len(places)
    arrays = (WORD * count)(*places), (WORD * count)(*words)
    return function(*arrays, WORD(count), WORD(rounds // 2), WORD(size), WORD(seed))


def outer(function, seed, tables):
    return scribble(function, seed, tables)


print("READY", os.getpid(), flush=True)
sys.stdin.readline()
done, found = 0, tables()
for seed, kind in ((7, ctypes.CDLL), (11, ctypes.PyDLL)):
    function = kind(library).scribble
    function.restype = WORD
    done += outer(function, seed, found)
print(done, len(found), flush=True)
sys.stdin.readline()
