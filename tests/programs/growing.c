/* OPS RATE: allocates OPS blocks of 1000 bytes in total, keeps every tenth one and frees the others. Makes RATE
 * blocks a second (0: as fast as possible), in steps of ten milliseconds. */
#include "truth.h"
#include <time.h>
SITE(00, malloc(n)) SITE(01, malloc(n))
enum { SIZE = 1000 };

int main(int argc, char **argv) {
  uint64_t ops = argument(argc, argv, 1, 100000), rate = argument(argc, argv, 2, 0);
  ready();
  struct timespec tick;
  clock_gettime(CLOCK_MONOTONIC, &tick);
  for (uint64_t k = 0; k < ops; k++) {
    if (rate && k % (rate / 100 + 1) == 0) {
      tick.tv_nsec += 10000000;
      if (tick.tv_nsec >= 1000000000) { tick.tv_nsec -= 1000000000; tick.tv_sec++; }
      while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &tick, 0)) {}
    }
    int kept = k % 10 == 0;
    char *p = kept ? site_00(SIZE) : site_01(SIZE);
    took(kept ? 0 : 1, SIZE);
    *(volatile char *)p = 1;
    if (!kept) { free(p); gave(1, SIZE); }
  }
  report();
  return 0;
}
