/* LEVELS: one allocation on each of 2^LEVELS different stacks; one of ten stays allocated. */
#include "truth.h"
SITE(00, malloc(n))
static uint64_t turns;
static NOINLINE void left(unsigned levels);
static NOINLINE void right(unsigned levels);
static NOINLINE void leaf(void) {
  void *p = site_00(40); took(0, 40);
  if (turns++ % 10) { free(p); gave(0, 40); }
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
int main(int argc, char **argv) {
  uint64_t levels = argument(argc, argv, 1, 10);
  if (levels > 24) die("at most 24 levels");
  ready();
  below((unsigned)levels);
  report();
  return 0;
}
