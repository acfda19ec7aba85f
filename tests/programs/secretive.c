/* OPS PAUSE: takes a secret from MARKER in its environment, and holds it on its stack and in its heap while it
 * allocates OPS times, with a pause of PAUSE microseconds after each 20. */
#include "truth.h"
SITE(00, malloc(n))
enum { SIZE = 1000, COPIES = 64, PACE = 20 };

NOINLINE static void work(const char *marker, uint64_t ops, uint64_t pause_us) {
  char on_stack[COPIES][64];
  for (int i = 0; i < COPIES; i++) snprintf(on_stack[i], sizeof on_stack[i], "%s", marker);
  char *pointer = on_stack[0];
  KEEP(pointer);
  ready();
  for (uint64_t k = 0; k < ops; k++) {
    char *p = site_00(SIZE);
    took(0, SIZE);
    memcpy(p, on_stack[k % COPIES], 64);
    KEEP(p);
    if (k % 10) { free(p); gave(0, SIZE); }
    if (pause_us && k % PACE == 0) usleep((useconds_t)pause_us);
  }
  report();
  KEEP(pointer);
}

int main(int argc, char **argv) {
  const char *marker = getenv("MARKER");
  if (!marker) die("no MARKER");
  work(marker, argument(argc, argv, 1, 2000), argument(argc, argv, 2, 0));
  return 0;
}
