/* COUNT…: bursts of so many allocations of 4 MiB each, all but the last of which are freed. A step after each burst. */
#include "truth.h"
enum { BYTES = 4 << 20, DEEP = 4096 };
SITE(00, malloc(n))
static NOINLINE void burst(uint64_t count) {
  /* So much more of the stack is copied with each sample. */
  char deep[DEEP]; char *kept = deep; KEEP(kept);
  for (uint64_t i = 0; i < count; i++) {
    void *p = site_00(BYTES); took(0, BYTES);
    if (i + 1 < count) { free(p); gave(0, BYTES); }
  }
}
int main(int argc, char **argv) {
  ready();
  for (int i = 1; i < argc; i++) {
    burst(argument(argc, argv, i, 0));
    step();
  }
  report();
  return 0;
}
