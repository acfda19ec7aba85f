// Locks all its memory, as real-time programs do, and allocates: locking ROUNDS [executable]. With a second argument,
// makes all its new memory executable instead, as old programs do.
#include <sys/mman.h>
#include <sys/personality.h>
#include "truth.h"
SITE(00, malloc(n))
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 1000);
  if (argc > 2) {
    if (personality(personality(0xffffffff) | READ_IMPLIES_EXEC) == -1) die("cannot make its memory executable");
  } else if (mlockall(MCL_CURRENT | MCL_FUTURE)) die("cannot lock its memory");
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
