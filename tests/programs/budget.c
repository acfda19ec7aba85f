/* ROUNDS BLOCKS FREES SIZE: each round allocates BLOCKS blocks of SIZE at site_00 and frees every second one, allocates
 * and frees one of 100 bytes at site_01, frees FREES blocks from before READY, and uses 2 ms of CPU time. */
#include "truth.h"
SITE(00, malloc(n)) SITE(01, malloc(n))
enum { WORK_NS = 2000000 };

static uint64_t cpu_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 1000), blocks = argument(argc, argv, 2, 0);
  uint64_t frees = argument(argc, argv, 3, 0), size = argument(argc, argv, 4, 100);
  struct block { struct block *next; } *before = 0;
  for (uint64_t i = 0; i < rounds * frees; i++) {
    struct block *p = malloc(sizeof *p);
    p->next = before;
    before = p;
  }
  ready();
  for (uint64_t k = 0; k < rounds; k++) {
    for (uint64_t i = 0; i < blocks; i++) {
      void *p = site_00(size);
      took(0, size);
      if (i % 2) {
        free(p);
        gave(0, size);
      }
    }
    free(site_01(100));
    took(1, 100);
    gave(1, 100);
    for (uint64_t i = 0; i < frees; i++) {
      struct block *p = before;
      before = p->next;
      free(p);
    }
    uint64_t until = cpu_ns() + WORK_NS;
    while (cpu_ns() < until) {}
  }
  report();
  return 0;
}
