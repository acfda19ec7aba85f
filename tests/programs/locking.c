// Locks all its memory, as real-time programs do, and allocates.
#include <sys/mman.h>
#include "truth.h"
SITE(00, malloc(n))
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 1000);
  if (mlockall(MCL_CURRENT | MCL_FUTURE)) die("cannot lock its memory");
  ready();
  for (uint64_t r = 0; r < rounds; r++) {
    void *p = site_00(100);
    took(0, 100);
    free(p);
    gave(0, 100);
  }
  report();
  return 0;
}
