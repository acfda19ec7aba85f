/* BLOCKS SIZE ROUNDS FREES: allocates BLOCKS blocks of SIZE at site_00, then steps; then load, then steps; then allocates as
 * many at site_01, frees every second one of these, and every second one of the first.
 *
 * The load: ROUNDS times FREES blocks from before READY are freed, with 2 ms of CPU time in between; if FREES is 0, for ROUNDS
 * milliseconds pairs of malloc and free at site_02. */
#include "truth.h"
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, malloc(n))
enum { WORK_NS = 2000000, MOST = 4096, PAIR = 16 };
static void *old[MOST];

static uint64_t now_ns(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
static void pairs(uint64_t milliseconds) {
  uint64_t until = now_ns(CLOCK_MONOTONIC) + milliseconds * 1000000u;
  while (now_ns(CLOCK_MONOTONIC) < until) {
    for (int i = 0; i < 100; i++) {
      free(site_02(PAIR));
      took(2, PAIR);
      gave(2, PAIR);
    }
  }
}
int main(int argc, char **argv) {
  uint64_t blocks = argument(argc, argv, 1, 100), size = argument(argc, argv, 2, 100000);
  uint64_t rounds = argument(argc, argv, 3, 3000), frees = argument(argc, argv, 4, 0);
  struct block { struct block *next; } *before = 0;
  if (blocks > MOST) die("too many blocks");
  for (uint64_t i = 0; i < rounds * frees; i++) {
    struct block *p = malloc(sizeof *p);
    p->next = before;
    before = p;
  }
  ready();
  for (uint64_t i = 0; i < blocks; i++) {
    old[i] = site_00(size);
    took(0, size);
  }
  step();
  if (!frees) pairs(rounds);
  for (uint64_t k = 0; frees && k < rounds; k++) {
    for (uint64_t i = 0; i < frees; i++) {
      struct block *p = before;
      before = p->next;
      free(p);
    }
    uint64_t until = now_ns(CLOCK_THREAD_CPUTIME_ID) + WORK_NS;
    while (now_ns(CLOCK_THREAD_CPUTIME_ID) < until) {}
  }
  step();
  for (uint64_t i = 0; i < blocks; i++) {
    void *p = site_01(size);
    took(1, size);
    if (i % 2) {
      free(p);
      gave(1, size);
      free(old[i]);
      gave(0, size);
    }
  }
  report();
  return 0;
}
