/* OPS DEPTH: allocations below a recursion of DEPTH calls with ROOM bytes of locals each; every tenth block stays. */
#include "truth.h"
#ifndef ROOM
#define ROOM 1
#endif
SITE(00, malloc(n))
static uint64_t ops;
static NOINLINE void descend(uint64_t depth) {
  char locals[ROOM];
  char *there = locals;
  KEEP(there);
  if (depth) {
    descend(depth - 1);
    KEEP(depth);
    return;
  }
  for (uint64_t k = 0; k < ops; k++) {
    void *p = site_00(250); took(0, 250);
    if (k % 10) { free(p); gave(0, 250); }
  }
}
int main(int argc, char **argv) {
  ops = argument(argc, argv, 1, 2000);
  uint64_t depth = argument(argc, argv, 2, 1000);
  ready();
  descend(depth);
  report();
  return 0;
}
