/* MOST EVERY: one allocation of 100 bytes on each of MOST different stacks (8,192 at most) of 16 functions each, none of which calls
 * itself; one of ten stays allocated. Then, forever: an allocation on each fiftieth of these stacks every EVERY milliseconds, freed
 * at once. */
#include "truth.h"
enum { SIZE = 100 };
SITE(00, malloc(n))
static uint64_t leaves, most;
static int again;
static NOINLINE void leaf(void) {
  uint64_t place = leaves++;
  if (place >= most || (again && place % 50)) return;
  void *p = site_00(SIZE); took(0, SIZE);
  if (place % 10 || again) { free(p); gave(0, SIZE); }
}
/* What is kept differs, so that no two functions are made one. */
#define BRANCH(NAME, MARK, CALLS) static NOINLINE void NAME(void) { int mark = MARK; CALLS KEEP(mark); }
#define LEVEL(N, M) BRANCH(left_##N, 2 * N, left_##M(); right_##M();) BRANCH(right_##N, 2 * N + 1, left_##M(); right_##M();)
BRANCH(left_0, 0, leaf();) BRANCH(right_0, 1, leaf();)
LEVEL(1, 0) LEVEL(2, 1) LEVEL(3, 2) LEVEL(4, 3) LEVEL(5, 4) LEVEL(6, 5) LEVEL(7, 6) LEVEL(8, 7) LEVEL(9, 8) LEVEL(10, 9)
LEVEL(11, 10) LEVEL(12, 11)

int main(int argc, char **argv) {
  most = argument(argc, argv, 1, 8192);
  uint64_t every = argument(argc, argv, 2, 1000);
  ready();
  for (;; again = 1, leaves = 0) {
    left_12();
    right_12();
    struct timespec pause = {(time_t)(every / 1000), (long)(every % 1000 * 1000000)};
    nanosleep(&pause, 0);
  }
}
