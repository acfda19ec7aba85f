/* ROUNDS: lives for a few milliseconds and reports, without waiting for input (FREE_RUNNING). */
#include "truth.h"
SITE(00, malloc(n))
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 1000);
  ready();
  for (uint64_t r = 0; r < rounds; r++) { void *p = site_00(100); took(0, 100); if (r % 4) { free(p); gave(0, 100); } }
  usleep(5000);
  report();
  return 0;
}
