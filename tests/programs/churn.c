/* MODE OPS [THREADS]: allocation at full speed or paced, for comparing profilers.
 *   pairs   malloc(100) and free, OPS times in total, a site per thread
 *   mix     twenty sites at depths 4 to 30, log-normal sizes of 16 B to 64 KiB, exponential lifetimes by site
 *   paced   the same, 50,000 allocations a second
 *   leak    as mix, but one in a hundred blocks of site_13 is never freed
 * Truth is kept in plain variables, so that the bookkeeping does not distort the measurement. Prints "READY pid", waits
 * for a line, runs, prints one line of JSON, waits for a line. Between the two lines only the sites allocate. */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define NOINLINE __attribute__((noinline, noclone))
#define KEEP(p) __asm__ volatile("" : "+r"(p) : : "memory")
#define SITE(NN, CALL) \
  NOINLINE void *site_##NN(size_t n) { void *p = (CALL); KEEP(p); return p; }
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, malloc(n)) SITE(03, malloc(n)) SITE(04, malloc(n))
SITE(05, malloc(n)) SITE(06, malloc(n)) SITE(07, malloc(n)) SITE(08, malloc(n)) SITE(09, malloc(n))
SITE(10, malloc(n)) SITE(11, malloc(n)) SITE(12, malloc(n)) SITE(13, malloc(n)) SITE(14, malloc(n))
SITE(15, malloc(n)) SITE(16, calloc(1, n)) SITE(17, calloc(n / 8, 8)) SITE(19, aligned_alloc(64, n))
/* Two allocations, of which one stays allocated. */
NOINLINE void *site_18(size_t n) {
  void *p = malloc(n / 2);
  KEEP(p);
  p = realloc(p, n);
  KEEP(p);
  return p;
}
enum { SITES = 20, LEAKING = 13, PLAN = 8192, WHEEL = 1 << 18, MOST_THREADS = 8, PACE = 50 };
static void *(*const site[SITES])(size_t) = {
    site_00, site_01, site_02, site_03, site_04, site_05, site_06, site_07, site_08, site_09,
    site_10, site_11, site_12, site_13, site_14, site_15, site_16, site_17, site_18, site_19};
/* Padded: each thread of `pairs` has a site of its own. */
static struct { uint64_t allocs, bytes, live_allocs, live_bytes, padding[4]; } truth[SITES];

static uint64_t now(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
static void put(const char *text, size_t bytes) {
  while (bytes) {
    ssize_t k = write(1, text, bytes);
    if (k < 0 && errno == EINTR) continue;
    if (k < 0) _exit(98);
    text += k; bytes -= (size_t)k;
  }
}
static void wait_line(void) {
  char c = 0;
  while (c != '\n') {
    ssize_t k = read(0, &c, 1);
    if (k < 0 && errno == EINTR) continue;
    if (k <= 0) return;
  }
}

static uint64_t each;
static pthread_barrier_t start;
static NOINLINE void pairs(int i) {
  for (uint64_t k = 0; k < each; k++) {
    char *p = site[i](100);
    *(volatile char *)p = 1;
    free(p);
    truth[i].allocs++; truth[i].bytes += 100;
  }
}
static void *thread_main(void *i) {
  pthread_barrier_wait(&start);
  pairs((int)(intptr_t)i);
  return 0;
}

/* The first 16 bytes of every block say where it came from. */
struct block { struct block *next; uint32_t site, size; };
static struct block *wheel[WHEEL];
static struct { uint32_t life, size; uint8_t site, depth; } plan[PLAN];

static uint64_t next_random(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
static double uniform(uint64_t *state) { return ((double)(next_random(state) >> 11) + 0.5) / 9007199254740992.0; }
static void make_plan(void) {
  uint64_t seed = 61;
  for (int k = 0; k < PLAN; k++) {
    /* Low site numbers are more frequent; the leaking site is as frequent as the first. */
    uint32_t i = uniform(&seed) < 0.1 ? LEAKING : (uint32_t)(uniform(&seed) * uniform(&seed) * SITES);
    double normal = sqrt(-2 * log(uniform(&seed))) * cos(2 * M_PI * uniform(&seed));
    double bytes = exp(log(120.0 + 20.0 * i) + 1.4 * normal);
    uint32_t n = bytes < 16 ? 16 : bytes > 65536 ? 65536 : (uint32_t)bytes;
    if (i == 17) n = (n + 7) & ~7u;
    if (i == 18 && n < 32) n = 32;
    if (i == 19) n = (n + 63) & ~63u;
    double life = 1 - log(uniform(&seed)) * 100.0 * pow(1.4, i); /* 100 to 60,000 operations on average */
    plan[k].life = life < WHEEL - 1 ? (uint32_t)life : WHEEL - 1;
    plan[k].size = n; plan[k].site = (uint8_t)i; plan[k].depth = (uint8_t)(i * 26 / 19);
  }
}
static NOINLINE void *descend(int depth, uint32_t i, size_t n) {
  void *p = depth ? descend(depth - 1, i, n) : site[i](n);
  KEEP(p);
  return p;
}
static void free_due(uint64_t slot) {
  struct block *b = wheel[slot];
  wheel[slot] = 0;
  while (b) {
    struct block *next = b->next;
    truth[b->site].live_allocs--; truth[b->site].live_bytes -= b->size;
    free(b);
    b = next;
  }
}
static void step(uint64_t k, int leaks) {
  free_due(k % WHEEL);
  uint64_t seed = k;
  uint32_t j = (uint32_t)(next_random(&seed) % PLAN), i = plan[j].site, n = plan[j].size;
  struct block *b = descend(plan[j].depth, i, n);
  truth[i].allocs++; truth[i].bytes += n; truth[i].live_allocs++; truth[i].live_bytes += n;
  if (i == 18) { truth[i].allocs++; truth[i].bytes += n / 2; }
  if (leaks && i == LEAKING && truth[i].allocs % 100 == 0) return;
  uint64_t due = (k + plan[j].life) % WHEEL;
  b->site = i; b->size = n; b->next = wheel[due];
  wheel[due] = b;
}
static void run_mix(uint64_t ops, int paced, int leaks) {
  uint64_t due = now(CLOCK_MONOTONIC);
  for (uint64_t k = 0; k < ops; k++) {
    step(k, leaks);
    if (paced && k % PACE == PACE - 1) {
      due += 1000000;
      struct timespec at = {(time_t)(due / 1000000000u), (long)(due % 1000000000u)};
      while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, 0) == EINTR) {}
    }
  }
}
int main(int argc, char **argv) {
  if (argc < 3) return 2;
  const char *mode = argv[1];
  uint64_t ops = strtoull(argv[2], 0, 10), threads = argc > 3 ? strtoull(argv[3], 0, 10) : 1;
  int in_pairs = !strcmp(mode, "pairs"), paced = !strcmp(mode, "paced"), leaks = !strcmp(mode, "leak");
  if (threads < 1 || threads > MOST_THREADS) return 2;
  if (!in_pairs && !paced && !leaks && strcmp(mode, "mix")) return 2;
  make_plan();
  memset(wheel, 1, sizeof wheel);
  memset(wheel, 0, sizeof wheel); /* faults its pages in */
  each = ops / threads;
  pthread_t ids[MOST_THREADS];
  pthread_barrier_init(&start, 0, (unsigned)threads);
  for (uint64_t i = 1; in_pairs && i < threads; i++)
    if (pthread_create(&ids[i], 0, thread_main, (void *)(intptr_t)i)) return 97;
  static char text[8192];
  put(text, (size_t)snprintf(text, sizeof text, "READY %d\n", (int)getpid()));
  wait_line();
  uint64_t cpu = now(CLOCK_PROCESS_CPUTIME_ID), wall = now(CLOCK_MONOTONIC);
  if (in_pairs) {
    thread_main(0);
    for (uint64_t i = 1; i < threads; i++) pthread_join(ids[i], 0);
  } else
    run_mix(ops, paced, leaks);
  wall = now(CLOCK_MONOTONIC) - wall;
  cpu = now(CLOCK_PROCESS_CPUTIME_ID) - cpu;
  for (uint64_t slot = 0; leaks && slot < WHEEL; slot++) free_due(slot);
  int k = snprintf(text, sizeof text, "{\"wall_ns\":%llu,\"cpu_ns\":%llu,\"sites\":[", (unsigned long long)wall,
                   (unsigned long long)cpu);
  const char *comma = "";
  for (int i = 0; i < SITES; i++) {
    if (!truth[i].allocs) continue;
    k += snprintf(text + k, sizeof text - (size_t)k,
                  "%s{\"site\":\"site_%02d\",\"allocs\":%llu,\"bytes\":%llu,\"live_allocs\":%llu,\"live_bytes\":%llu}", comma,
                  i, (unsigned long long)truth[i].allocs, (unsigned long long)truth[i].bytes,
                  (unsigned long long)truth[i].live_allocs, (unsigned long long)truth[i].live_bytes);
    comma = ",";
  }
  put(text, (size_t)k);
  put("]}\n", 3);
  wait_line();
  return 0;
}
