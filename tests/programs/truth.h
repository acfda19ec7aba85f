/* Shared by the programs: the protocol with the harness, and the exact truth per call site.
 *
 * Protocol: print "READY pid", wait for a line, run, print one line of JSON, wait for a line, end.
 * Programs with several steps print "STEP" and wait for a line between them. With FREE_RUNNING in
 * the environment nothing waits (for programs that heapbpf itself starts).
 *
 * Between READY and the report nothing allocates except at the sites: no stdio, no threads created,
 * and the tables are in a shared mapping, which fork, vfork and exec leave in place. */
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NOINLINE __attribute__((noinline, noclone))
/* The pointer escapes here, so that no dead allocation is removed and no call becomes a tail jump. */
#define KEEP(p) __asm__ volatile("" : "+r"(p) : : "memory")

/* Defines `void *site_NN(size_t n)`, whose body calls the allocator once. */
#define SITE(NN, CALL)              \
  NOINLINE void *site_##NN(size_t n) { \
    void *p = (CALL);               \
    KEEP(p);                        \
    return p;                       \
  }

enum { SITES = 32, SIZES = 4096, PROCESSES = 4, TRUTH_FD = 100 };

struct size_row { uint64_t key, allocs, live; }; /* key: size + 1, 0 = empty */
struct site_truth {
  uint64_t allocs, bytes, live_allocs, live_bytes;
  struct size_row rows[SIZES];
  uint32_t lock, used;
};
struct process_truth { uint64_t pid; struct site_truth sites[SITES]; };
struct truth {
  uint64_t failed;    /* allocation calls that returned NULL */
  uint64_t abandoned; /* allocation calls that never returned */
  struct process_truth processes[PROCESSES];
};
static struct truth *truth;
static int truth_slot;

static void die(const char *why) {
  ssize_t k = write(2, why, strlen(why));
  k += write(2, "\n", 1);
  _exit(99);
}

/* Truth of a process that shares this one's memory or table: slot 0 is the first process. */
static void took_in(int slot, int site, uint64_t size) {
  struct site_truth *t = &truth->processes[slot].sites[site];
  while (__atomic_exchange_n(&t->lock, 1, __ATOMIC_ACQUIRE)) {}
  uint32_t i = (uint32_t)((size * 0x9e3779b97f4a7c15ull) >> 52);
  while (t->rows[i].key && t->rows[i].key != size + 1) i = (i + 1) % SIZES;
  if (!t->rows[i].key && ++t->used == SIZES) die("too many distinct sizes");
  t->rows[i].key = size + 1;
  t->rows[i].allocs++; t->rows[i].live++;
  t->allocs++; t->bytes += size; t->live_allocs++; t->live_bytes += size;
  __atomic_store_n(&t->lock, 0, __ATOMIC_RELEASE);
}
static void gave_in(int slot, int site, uint64_t size) {
  struct site_truth *t = &truth->processes[slot].sites[site];
  while (__atomic_exchange_n(&t->lock, 1, __ATOMIC_ACQUIRE)) {}
  uint32_t i = (uint32_t)((size * 0x9e3779b97f4a7c15ull) >> 52);
  while (t->rows[i].key && t->rows[i].key != size + 1) i = (i + 1) % SIZES;
  if (!t->rows[i].key) die("gave what was never taken");
  t->rows[i].live--; t->live_allocs--; t->live_bytes -= size;
  __atomic_store_n(&t->lock, 0, __ATOMIC_RELEASE);
}
/* Records that a block of `size` bytes was allocated at `site`, or that one from `site` was freed. */
__attribute__((unused)) static void took(int site, uint64_t size) { took_in(truth_slot, site, size); }
__attribute__((unused)) static void gave(int site, uint64_t size) { gave_in(truth_slot, site, size); }
__attribute__((unused)) static void refused(const void *p) {
  if (p) die("an allocation that had to fail succeeded");
  truth->failed++;
}
/* From here on, records for the process in `slot`. */
static void truth_is(int slot) {
  truth_slot = slot;
  truth->processes[slot].pid = getpid();
}
static void truth_map(int fd) {
  truth = (struct truth *)mmap(0, sizeof *truth, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (truth == MAP_FAILED) die("cannot map the truth");
}

/* What is put is written at the end of a line: a report has tens of thousands of numbers. */
static struct { size_t used; char bytes[4096]; } gathered;
static void write_gathered(void) {
  for (size_t done = 0; done < gathered.used;) {
    ssize_t k = write(1, gathered.bytes + done, gathered.used - done);
    if (k < 0 && errno == EINTR) continue;
    if (k < 0) _exit(98);
    done += (size_t)k;
  }
  gathered.used = 0;
}
static void put(const char *text, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) {
    gathered.bytes[gathered.used++] = text[i];
    if (text[i] == '\n' || gathered.used == sizeof gathered.bytes) write_gathered();
  }
}
static void put_text(const char *text) { put(text, strlen(text)); }
static void put_number(uint64_t n) {
  char b[20]; int k = 20;
  do b[--k] = (char)('0' + n % 10); while (n /= 10);
  put(b + k, (size_t)(20 - k));
}
static void wait_line(void) {
  if (getenv("FREE_RUNNING")) return;
  char c = 0;
  while (c != '\n') {
    ssize_t k = read(0, &c, 1);
    if (k < 0 && errno == EINTR) continue;
    if (k <= 0) return; /* the harness is gone: run to the end */
  }
}
/* Call this once, when the program's own setup no longer allocates. */
static void ready(void) {
  int fd = memfd_create("truth", 0);
  if (fd < 0 || ftruncate(fd, sizeof *truth) || dup2(fd, TRUTH_FD) < 0) die("cannot make the truth");
  close(fd);
  truth_map(TRUTH_FD);
  truth_is(0);
  put_text("READY "); put_number((uint64_t)getpid()); put_text("\n");
  wait_line();
}
__attribute__((unused)) static void step(void) { put_text("STEP\n"); wait_line(); }

/* One line of JSON. Nothing allocates. */
static void report(void) {
  put_text("{\"failed\":"); put_number(truth->failed);
  put_text(",\"abandoned\":"); put_number(truth->abandoned);
  put_text(",\"sites\":[");
  const char *comma = "";
  for (int s = 0; s < PROCESSES; s++)
    for (int i = 0; i < SITES; i++) {
      struct site_truth *t = &truth->processes[s].sites[i];
      if (!t->allocs) continue;
      char name[] = "site_00";
      name[5] = (char)('0' + i / 10); name[6] = (char)('0' + i % 10);
      put_text(comma); comma = ",";
      put_text("{\"pid\":"); put_number(truth->processes[s].pid);
      put_text(",\"site\":\""); put_text(name);
      put_text("\",\"allocs\":"); put_number(t->allocs);
      put_text(",\"bytes\":"); put_number(t->bytes);
      put_text(",\"live_allocs\":"); put_number(t->live_allocs);
      put_text(",\"live_bytes\":"); put_number(t->live_bytes);
      put_text(",\"sizes\":[");
      const char *inner = "";
      for (int k = 0; k < SIZES; k++) {
        if (!t->rows[k].key) continue;
        put_text(inner); inner = ",";
        put_text("["); put_number(t->rows[k].key - 1);
        put_text(","); put_number(t->rows[k].allocs);
        put_text(","); put_number(t->rows[k].live); put_text("]");
      }
      put_text("]}");
    }
  put_text("]}\n");
  wait_line();
}

/* SplitMix64: a stream of 64-bit numbers from a seed. */
__attribute__((unused)) static uint64_t next_random(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
__attribute__((unused)) static uint64_t argument(int argc, char **argv, int i, uint64_t otherwise) {
  return argc > i ? strtoull(argv[i], 0, 10) : otherwise;
}
