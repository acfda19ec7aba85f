/* LEVELS SIZE DEPTH: one allocation of SIZE bytes on each of 2^LEVELS different stacks, DEPTH calls further down than
 * these need; one of ten stays allocated. */
#include "truth.h"
SITE(00, malloc(n))
static uint64_t turns, size = 40;
static NOINLINE void left(unsigned levels);
static NOINLINE void right(unsigned levels);
static NOINLINE void leaf(void) {
  void *p = site_00(size); took(0, size);
  if (turns++ % 10) { free(p); gave(0, size); }
}
static void below(unsigned levels) {
  if (levels) {
    left(levels - 1);
    right(levels - 1);
  } else {
    leaf();
  }
  KEEP(levels);
}
void left(unsigned levels) { below(levels); KEEP(levels); }
void right(unsigned levels) { below(levels); KEEP(levels); }
static NOINLINE void descend(uint64_t depth, unsigned levels) {
  if (depth) descend(depth - 1, levels);
  else below(levels);
  KEEP(depth);
}
int main(int argc, char **argv) {
  uint64_t levels = argument(argc, argv, 1, 10), depth = argument(argc, argv, 3, 0);
  size = argument(argc, argv, 2, size);
  if (levels > 24 || depth > 400) die("at most 24 levels, 400 calls");
  ready();
  descend(depth, (unsigned)levels);
  report();
  return 0;
}
