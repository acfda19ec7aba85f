"""HEAPBPF [ROUNDS]: benchmarks of pyperformance under heapbpf, memray and scalene. Prints what each costs, and which
shares of all allocated bytes each gives to the functions that allocate most by memray, which sees every allocation."""
import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import pyperformance

HEAPBPF, ROUNDS = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
# The last instead of those with sqlalchemy, which is a package of its own.
BENCHMARKS = {"json_dumps": [], "pickle": ["pickle"], "regex_compile": [], "async_tree": ["none"], "sqlite_synth": []}
# Seconds that a program takes at least without a profiler, and that a command may take.
LEAST_SECONDS, LIMIT_SECONDS = 3.0, 60
EXACT = "memray, Python's objects"
FINE = "heapbpf -i 64KiB"


def commands(program, file):
    """The command lines by column. What they write goes to a file that has the column's number at its end."""
    python = [sys.executable, *program]
    memray = [sys.executable, "-m", "memray", "run", "-q", "-f"]
    scalene = [sys.executable, "-m", "scalene", "run", "--memory", "--profile-all"]
    return {
        "bare": python,
        "heapbpf": [HEAPBPF, "-q", "--force", "-o", f"{file}.1.json", "--", *python],
        FINE: [HEAPBPF, "-q", "--force", "-i", "64KiB", "-o", f"{file}.2.json", "--", *python],
        "memray": [*memray, "-o", f"{file}.3.bin", *program],
        EXACT: [*memray, "--trace-python-allocators", "-o", f"{file}.4.bin", *program],
        "scalene": [*scalene, "-o", f"{file}.5.json", program[0], "---", *program[1:]],
    }


def seconds(command):
    """How long a command takes, its profiler's start and end included; infinity beyond the limit."""
    begun = time.monotonic()
    kinds = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **kinds) as child:
        try:
            output, _ = child.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            return float("inf")
    if child.returncode:
        sys.exit(f"{' '.join(command)}: {child.returncode}\n{output}")
    return time.monotonic() - begun


def calibrated(name):
    """The program and its arguments: as many loops as take long enough."""
    benchmarks = pathlib.Path(pyperformance.__file__).parent / "data-files/benchmarks"
    script, loops = str(benchmarks / f"bm_{name}/run_benchmark.py"), 1
    while True:
        program = [script, "--worker", "-l", str(loops), "-w", "0", "-n", "1", *BENCHMARKS[name]]
        if seconds([sys.executable, *program]) >= LEAST_SECONDS:
            return program
        loops *= 2


def shares(bytes_by_function):
    total = sum(bytes_by_function.values()) or 1
    return {function: bytes / total for function, bytes in bytes_by_function.items()}


def function_of(name, file):
    """Versions differ in whether a name has its class."""
    return f"{name.split('.')[-1]} ({os.path.basename(file)})"


def by_heapbpf(file):
    """By the innermost Python frame of each stack."""
    sums = collections.Counter()
    for stack in json.load(open(file))["stacks"]:
        frames = [frame for frame in stack["frames"] if (frame.get("file") or "").endswith(".py")]
        function = function_of(frames[0]["function"] or "?", frames[0]["file"]) if frames else "(no Python function)"
        sums[function] += stack["alloc_bytes"]["estimate"] or 0
    return shares(sums)


def by_memray(file):
    stats = f"{file}.json"
    seconds([sys.executable, "-m", "memray", "stats", "--json", "-n", "1000", "-f", "-o", stats, file])
    sums = collections.Counter()
    for location in json.load(open(stats))["top_allocations_by_size"]:
        name, path, _ = location["location"].rsplit(":", 2)
        sums[function_of(name, path)] += location["size"]
    return shares(sums)


def by_scalene(file):
    sums = collections.Counter()
    if not os.path.exists(file):
        return sums
    for path, of_file in json.load(open(file))["files"].items():
        for function in of_file["functions"]:
            sums[function_of(function["line"].strip(), path)] += function["n_malloc_mb"]
    return shares(sums)


def cost(times, bare):
    return f"{min(times) / bare:.2f}" if max(times) < LIMIT_SECONDS else f"> {LIMIT_SECONDS} s"


def row(cells):
    print("| " + " | ".join(cells) + " |", flush=True)


def main():
    agreement = []
    with tempfile.TemporaryDirectory() as directory:
        for number, name in enumerate(BENCHMARKS):
            file = f"{directory}/{name}"
            columns = commands(calibrated(name), file)
            if number == 0:
                row(["benchmark", "bare, s", *list(columns)[1:]])
                row(["---"] * (len(columns) + 1))
            taken = collections.defaultdict(list)
            for _ in range(ROUNDS):
                for column, command in columns.items():
                    if float("inf") not in taken[column]:
                        taken[column].append(seconds(command))
            # The least of the rounds: what else the machine does only adds to a time.
            bare = min(taken.pop("bare"))
            row([name, f"{bare:.1f}", *(cost(times, bare) for times in taken.values())])
            exact = by_memray(f"{file}.4.bin")
            each = [exact, by_heapbpf(f"{file}.2.json"), by_scalene(f"{file}.5.json")]
            for function in sorted(exact, key=exact.get, reverse=True)[:5]:
                found = [of_tool.get(function, 0) for of_tool in each]
                agreement.append([name, f"`{function}`", *(f"{100 * share:.1f} %" for share in found)])
            common = lambda other: sum(min(share, other.get(function, 0)) for function, share in exact.items())
            alike = [f"{100 * common(other):.1f} %" for other in each]
            agreement.append([name, "in common with memray, all functions", *alike])
    print()
    row(["benchmark", "function", EXACT, FINE, "scalene"])
    row(["---"] * 5)
    for cells in agreement:
        row(cells)


main()
