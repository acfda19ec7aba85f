/* STEPS: a program with leaks, one step every half a millisecond, each allocating a block at these sites:
 * 00: freed after 4 steps, but 1 block in 25 is never freed; 01: all freed after 4 steps; 02: never freed;
 * 03: all are freed, after 1 to 512 steps, evenly by the logarithm; 04: freed after 2 steps, every fifth after 100;
 * 05: allocated in the first 50 steps, and never freed. */
#include "truth.h"
enum { MOST = 20000, SIZE = 200 };
SITE(00, malloc(n)) SITE(01, malloc(n)) SITE(02, malloc(n))
SITE(03, malloc(n)) SITE(04, malloc(n)) SITE(05, malloc(n))
/* Blocks of a site by the step in which they are freed. */
static void *due[5][MOST];

static void keep_until(int site, uint64_t step, void *p) {
  took(site, SIZE);
  while (step < MOST && due[site][step]) step++;
  if (step < MOST) due[site][step] = p;
}
int main(int argc, char **argv) {
  uint64_t steps = argument(argc, argv, 1, 2000), random = 1;
  ready();
  for (uint64_t k = 0; k < steps; k++) {
    struct timespec pause = {0, 500 * 1000};
    while (nanosleep(&pause, &pause)) {}
    for (int site = 0; site < 5; site++) {
      if (!due[site][k]) continue;
      free(due[site][k]); gave(site, SIZE);
      due[site][k] = 0;
    }
    keep_until(0, k % 25 ? k + 4 : MOST, site_00(SIZE));
    keep_until(1, k + 4, site_01(SIZE));
    keep_until(2, MOST, site_02(SIZE));
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    keep_until(3, k + (1ull << (random >> 60) % 10), site_03(SIZE));
    keep_until(4, k + (k % 5 ? 2 : 100), site_04(SIZE));
    if (k < 50) { void *p = site_05(SIZE); KEEP(p); took(5, SIZE); }
  }
  report();
  return 0;
}
